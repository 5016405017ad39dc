//! Libraries made by a C compiler at test time stand for NVIDIA's; without one, such tests are
//! skipped.

use std::path::PathBuf;
use std::process::Command;

use super::*;

const WISH: Wish = Wish {
    driver: None,
    best: false,
};

/// A shared library of this text, in a folder of the test's own; `None` without a C compiler.
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn made(test: &str, file: &str, text: &str) -> Option<PathBuf> {
    let folder =
        std::env::temp_dir().join(format!("roundpipe-library-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("made.c"), folder.join(file));
    std::fs::write(&source, text).unwrap();
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status();
    match made {
        Ok(status) if status.success() => Some(library),
        _ => {
            eprintln!("skipped: {test}: no C compiler");
            None
        }
    }
}

fn remove(library: &Path) {
    let _ = std::fs::remove_dir_all(library.parent().unwrap());
}

/// Drivers before 570 know the time between events by its first name only.
#[test]
#[cfg_attr(miri, ignore = "Miri starts no compiler")]
fn the_time_between_events_is_asked_by_the_name_that_all_drivers_know() {
    let text = "int cuEventElapsedTime(float* ms, void* a, void* b) { *ms = 2.5f; return a == b ? 400 : 0; }";
    let Some(path) = made("elapsed", "libdriver.so", text) else {
        return;
    };
    // SAFETY: the library is the one above.
    let library = unsafe { Library::new(&path) }.unwrap();
    let function = bind_elapsed(&library).expect("the plain name is there");
    let (mut ms, mut event) = (0.0, 0u64);
    // SAFETY: the library's function only compares the addresses.
    let asked = unsafe { function(&mut ms, (&raw mut event).cast(), std::ptr::null_mut()) };
    assert_eq!((asked, ms), (sys::CUresult::CUDA_SUCCESS, 2.5));
    remove(&path);
}

/// A file that is no library, and one without the functions, are errors of one line with their
/// names.
#[test]
#[cfg_attr(miri, ignore = "Miri starts no compiler")]
fn broken_libraries_are_named_in_one_line() {
    let Some(path) = made(
        "broken",
        "libnvrtc.so.12",
        "int nvrtcVersion(int* a, int* b) { return 0; }",
    ) else {
        return;
    };
    let why = load::<Nvrtc>(&LibraryPlace::At(path.clone()), WISH)
        .unwrap_err()
        .unwrap();
    for word in [
        path.to_str().unwrap(),
        "nvrtcGetNumSupportedArchs",
        "nvidia-cuda-nvrtc",
    ] {
        assert!(why.contains(word) && !why.contains('\n'), "{word}: {why}");
    }
    std::fs::write(&path, "no library\n").unwrap();
    let why = load::<Nvrtc>(&LibraryPlace::At(path.clone()), WISH)
        .unwrap_err()
        .unwrap();
    assert!(
        why.contains(path.to_str().unwrap()) && !why.contains('\n'),
        "{why}"
    );
    assert!(
        load::<Nvrtc>(&LibraryPlace::Named("libno-such-thing.so".to_owned()), WISH)
            .unwrap_err()
            .is_none()
    );
    remove(&path);
}

/// The loader is not asked for versions that the driver does not run.
#[test]
fn the_loader_is_asked_for_the_drivers_majors() {
    assert_eq!(majors::<Nvrtc>(Some(Version::new(13, 0))), [13, 12]);
    assert_eq!(majors::<CublasLt>(Some(Version::new(12, 4))), [12]);
    assert_eq!(majors::<Nvrtc>(None), [13, 12]);
    assert_eq!(majors::<Cudnn>(Some(Version::new(12, 4))), [9]);
}
