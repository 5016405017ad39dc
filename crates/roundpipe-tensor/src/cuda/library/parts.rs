//! The files of a library beyond its first, opened by their paths before it asks the loader for
//! them by name.
//!
//! NVRTC keeps its built-in functions in a second file. cuDNN is a small file in front of several
//! large ones, which it asks for when it is first called: by name, with all numbers first
//! (`libcudnn_graph.so.9.14.0`, then `.9.14`, then `.9`). The loader answers with what it has under
//! such a name already, then from `LD_LIBRARY_PATH`, and only then from the folder of the file that
//! asks; where it has nothing, cuDNN ends the process. Its graph file, once loaded, cannot be
//! unloaded. Hence the rules:
//!
//! 1. Versions are asked of the graph file, in a name space of the loader's that is used for
//!    nothing else: what is passed over answers to no name afterwards.
//! 2. A cuDNN without a graph file is refused, and so is one by whose names the loader gives files
//!    of another.
//! 3. What is taken is opened part by part, by path, each after those that it needs; then only the
//!    first file.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libloading::Library;

use super::calls::{Calls, Cudnn};
use super::places::{self, LibraryPlace};
use super::version::{self, Package, Version, cudnn_version};
use super::{Complaint, Wish, file_of, fits, one_line};
use crate::sync::lock;

/// The first file of the library at a place, which is yet to be opened, and the others. `None`
/// where nothing is there.
pub(super) fn open<C: Calls>(
    place: &LibraryPlace,
    wish: Wish,
) -> Result<(PathBuf, Vec<Library>), Option<Complaint>> {
    match (C::PACKAGE, place) {
        (Package::Cudnn, _) => cudnn(place, wish),
        (Package::Nvrtc, LibraryPlace::At(path)) => Ok((path.clone(), builtins(path))),
        (_, LibraryPlace::At(path)) => Ok((path.clone(), Vec::new())),
        (_, LibraryPlace::Named(name)) => Ok((PathBuf::from(name), Vec::new())),
    }
}

/// The part of NVRTC with its built-in functions, where it lies beside.
fn builtins(path: &Path) -> Vec<Library> {
    let major = places::file_version(path).first().copied();
    let beside = path.parent().map_or(Vec::new(), |folder| {
        places::files(folder, "libnvrtc-builtins.so")
    });
    let same =
        |file: &&PathBuf| major.is_none() || places::file_version(file).first().copied() == major;
    // SAFETY: as in `load`.
    beside
        .iter()
        .filter(same)
        .filter_map(|file| unsafe { Library::new(file) }.ok())
        .collect()
}

/// What a graph file tells of itself.
#[derive(Debug, Clone)]
struct GraphFile {
    path: PathBuf,
    /// 91400 for 9.14.0.
    number: usize,
    made_for: Version,
}

fn cudnn(place: &LibraryPlace, wish: Wish) -> Result<(PathBuf, Vec<Library>), Option<Complaint>> {
    let (file, graph) = match place {
        LibraryPlace::At(path) => (path.clone(), graph_beside(path, wish)?),
        LibraryPlace::Named(name) => graph_named(name, wish)?,
    };
    fits::<Cudnn>(
        &file,
        (graph.made_for.major, &graph.made_for.to_string()),
        wish.driver,
    )?;
    if wish.best && graph.number < version::OLDEST_CUDNN {
        return Err(Some(format!(
            "{} is cuDNN {}",
            file.display(),
            cudnn_version(graph.number)
        )));
    }
    alone(&graph).map_err(Some)?;
    let cannot = |e| {
        Some(one_line(&format!(
            "cannot load {}: {e}",
            graph.path.display()
        )))
    };
    // SAFETY: as in `load`.
    let first = unsafe { Library::new(&graph.path) }.map_err(cannot)?;
    // SAFETY: as in `load`.
    let others = others(&graph.path)
        .into_iter()
        .filter_map(|part| unsafe { Library::new(part) }.ok());
    Ok((file, std::iter::once(first).chain(others).collect()))
}

fn major_of(path: &Path) -> u32 {
    places::file_version(path).first().copied().unwrap_or(9)
}

/// The graph file in the folder of cuDNN's first file, or of the file that this is a link to.
fn graph_beside(path: &Path, wish: Wish) -> Result<GraphFile, Option<Complaint>> {
    let (file, get) = (path.display(), Package::Cudnn.name(wish.driver));
    let major = major_of(path);
    if major < 9 {
        let oldest = cudnn_version(version::OLDEST_CUDNN);
        return Err(Some(format!(
            "{file} is cuDNN {major}; {oldest} or newer is needed: `pip install {get}`"
        )));
    }
    let name = format!("libcudnn_graph.so.{major}");
    let real = path.canonicalize().unwrap_or_default();
    let mut beside = [path, &real]
        .into_iter()
        .filter_map(|path| Some(path.parent()?.join(&name)));
    let graph = beside.find(|graph| graph.exists());
    let graph = graph.ok_or_else(|| {
        Some(format!(
            "{file} has no {name} beside it: `pip install -U {get}`"
        ))
    })?;
    ask(&graph).map_err(Some)
}

/// The graph file that the loader finds, with the first file that goes with it.
fn graph_named(name: &str, wish: Wish) -> Result<(PathBuf, GraphFile), Option<Complaint>> {
    let major = major_of(Path::new(name));
    let part = format!("libcudnn_graph.so.{major}");
    let graph = ask(Path::new(&part)).map_err(|_| {
        let get = Package::Cudnn.name(wish.driver);
        let lone = open_apart(Path::new(name)).is_ok();
        lone.then(|| format!("the loader knows {name}, but no {part}: `pip install {get}`"))
    })?;
    let beside = graph
        .path
        .with_file_name(format!("{}.{major}", Cudnn::FILE));
    Ok((
        if beside.exists() {
            beside
        } else {
            PathBuf::from(name)
        },
        graph,
    ))
}

/// Sees that names which cuDNN asks for lead to this graph file and no other.
fn alone(graph: &GraphFile) -> Result<(), Complaint> {
    let same = |other: &Path| other.canonicalize().ok() == graph.path.canonicalize().ok();
    let number = cudnn_version(graph.number);
    let short = number.rsplit_once('.').map_or("", |(short, _)| short);
    let numbered = [&number, short].map(|n| format!("libcudnn_graph.so.{n}"));
    let found = numbered
        .iter()
        .filter_map(|name| ask(Path::new(name)).ok())
        .map(|graph| graph.path);
    let other = found.chain(loaded(&format!(
        "libcudnn_graph.so.{}",
        major_of(&graph.path)
    )));
    match other.into_iter().find(|other| !same(other)) {
        None => Ok(()),
        Some(other) => Err(format!(
            "{} is not used, for the loader would mix it with {}: remove that one, or take its folder out of \
             LD_LIBRARY_PATH",
            graph.path.display(),
            other.display()
        )),
    }
}

/// The other parts beside a graph file, those first that others need. Without the part for
/// recurrent networks, which is large and whose functions we do not call.
fn others(graph: &Path) -> Vec<PathBuf> {
    let ending = format!(".so.{}", major_of(graph));
    let part = |path: &PathBuf| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let part = name
            .strip_prefix("libcudnn_")
            .and_then(|name| name.strip_suffix(&ending));
        part.filter(|part| !["graph", "adv"].contains(part))
            .map(str::to_owned)
    };
    let files = graph.parent().map(places::list).unwrap_or_default();
    let mut parts: Vec<_> = files
        .into_iter()
        .filter_map(|path| Some((part(&path)?, path)))
        .collect();
    parts.sort_by_key(|(part, _)| part != "ops");
    parts.into_iter().map(|(_, path)| path).collect()
}

/// Asks a graph file, by path or by name, for its versions; each once, since every answer takes a
/// name space.
fn ask(graph: &Path) -> Result<GraphFile, Complaint> {
    static ASKED: Mutex<BTreeMap<PathBuf, Result<GraphFile, Complaint>>> =
        Mutex::new(BTreeMap::new());
    let key = if graph.is_absolute() {
        graph.canonicalize().ok()
    } else {
        None
    };
    let mut asked = lock(&ASKED);
    let answer = asked
        .entry(key.unwrap_or_else(|| graph.to_owned()))
        .or_insert_with(|| ask_anew(graph));
    let path = if graph.is_absolute() {
        Some(graph.to_owned())
    } else {
        None
    };
    answer.clone().map(|known| GraphFile {
        path: path.unwrap_or(known.path),
        ..known
    })
}

fn ask_anew(graph: &Path) -> Result<GraphFile, Complaint> {
    type Number = unsafe extern "C" fn() -> usize;
    let file = graph.display();
    let library = open_apart(graph).map_err(|e| one_line(&format!("cannot load {file}: {e}")))?;
    let bind = |name: &'static str| {
        // SAFETY: the functions of both names have this type in every cuDNN.
        let function = unsafe { library.get::<Number>(name.as_bytes()) };
        function
            .map(|f| *f)
            .map_err(|_| format!("{file} has no function {name}, so it is none that we know"))
    };
    let (number, made_for) = (bind("cudnnGetVersion")?, bind("cudnnGetCudartVersion")?);
    let path = file_of(number as *const c_void).unwrap_or_else(|| graph.to_owned());
    // SAFETY: both only read constants.
    let (number, made_for) = unsafe { (number(), made_for()) };
    let made_for =
        Version::of_library(made_for).ok_or_else(|| format!("{file} does not tell its version"))?;
    Ok(GraphFile {
        path,
        number,
        made_for,
    })
}

/// Opens a library in a name space of its own, so that it answers to no name in ours even if it
/// cannot be unloaded.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn open_apart(file: &Path) -> Result<Library, String> {
    use std::os::unix::ffi::OsStrExt as _;
    let name = std::ffi::CString::new(file.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: loading runs the library's start-up code, which is NVIDIA's own; the name ends in a
    // zero.
    let handle = unsafe {
        libc::dlmopen(
            libc::LM_ID_NEWLM,
            name.as_ptr(),
            libc::RTLD_LAZY | libc::RTLD_LOCAL,
        )
    };
    if !handle.is_null() {
        // SAFETY: the loader gave this handle, and only the library made here closes it.
        return Ok(unsafe { libloading::os::unix::Library::from_raw(handle) }.into());
    }
    // SAFETY: asks for this thread's last failure.
    let why = unsafe { libc::dlerror() };
    if why.is_null() {
        return Err("the loader does not say why".to_owned());
    }
    // SAFETY: a text that ends in a zero and lives until this thread's next call of the loader.
    Err(unsafe { std::ffi::CStr::from_ptr(why) }
        .to_string_lossy()
        .into_owned())
}

/// Other loaders have no name spaces; what cannot be unloaded stays there.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn open_apart(file: &Path) -> Result<Library, String> {
    // SAFETY: loading runs the library's start-up code, which is NVIDIA's own.
    unsafe { Library::new(file) }.map_err(|e| e.to_string())
}

/// The file that has this name in the process already.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn loaded(name: &str) -> Option<PathBuf> {
    use libloading::os::unix::Library;
    // SAFETY: loads nothing.
    let library = unsafe { Library::open(Some(name), libc::RTLD_NOLOAD | libc::RTLD_LAZY) }.ok()?;
    // SAFETY: only its address is looked at.
    let function = unsafe { library.get::<*const c_void>(b"cudnnGetVersion\0") }.ok()?;
    file_of(function.into_raw())
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn loaded(_: &str) -> Option<PathBuf> {
    None
}
