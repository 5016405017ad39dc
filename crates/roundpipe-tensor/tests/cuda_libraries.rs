//! Which files are used of CUDA's libraries: made-up ones in made-up folders, each test in
//! processes of its own.
//!
//! A C compiler makes the libraries; without one the tests are skipped and say so. The made-up
//! driver says the version that a variable names, so that every pair of driver and library can be
//! met anywhere. The made-up cuDNN is in two files that find each other as NVIDIA's do.

#![cfg(target_os = "linux")]

#[path = "support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::Command;

use roundpipe_tensor::cuda::compile::{self, Unit};
use roundpipe_tensor::cuda::library;
use roundpipe_tensor::{Cuda, Error};

/// What the processes that tests start are asked for.
const ASKED: &str = "ROUNDPIPE_TEST_ASKED";

const DRIVER: &str = "#include <stdlib.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = atoi(getenv(\"FAKE_DRIVER\")); return 0; }
int cuDeviceGetCount(int* count) { *count = getenv(\"FAKE_CARD\") != NULL; return 0; }
int cuDeviceGet(int* card, int index) { *card = 7 + index; return 0; }
int cuDeviceGetAttribute(int* value, int what, int card) {
  int both = atoi(getenv(\"FAKE_CARD\"));
  *value = what == 75 ? both / 10 : both % 10;
  return card == 7 && (what == 75 || what == 76) ? 0 : 1;
}";

const NVRTC: &str =
    "int nvrtcVersion(int* major, int* minor) { *major = MAJOR; *minor = MINOR; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 2 + (MAJOR * 100 + MINOR >= 1208); return 0; }
int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80; archs[1] = 90;
  if (MAJOR * 100 + MINOR >= 1208) archs[2] = 120;
  return 0;
}
const char* nvrtcGetErrorString(int status) { return \"made up\"; }
int nvrtcCreateProgram(void) { return 1; }
int nvrtcCompileProgram(void) { return 1; }
int nvrtcGetCUBINSize(void) { return 1; }
#ifndef WITHOUT_CUBIN
int nvrtcGetCUBIN(void) { return 1; }
#endif
int nvrtcGetProgramLogSize(void) { return 1; }
int nvrtcGetProgramLog(void) { return 1; }
int nvrtcDestroyProgram(void) { return 1; }";

/// The part of cuDNN that knows its versions. Once loaded it stays, like the real one.
const CUDNN_GRAPH: &str = "#include <stddef.h>
size_t cudnnGetVersion(void) { return NUMBER; }
size_t cudnnGetCudartVersion(void) { return MADE_FOR; }";

/// The file in front, which asks for the other by name and ends the process without it. Behind, the
/// functions that we call and that only have to be there.
const CUDNN: &str = "#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
static size_t forward(const char* function) {
  void* graph = dlopen(\"libcudnn_graph.so.\" NUMBERS, RTLD_LAZY);
  if (!graph) graph = dlopen(\"libcudnn_graph.so.9\", RTLD_LAZY);
  if (!graph) abort();
  return ((size_t (*)(void))dlsym(graph, function))();
}
size_t cudnnGetVersion(void) { return forward(\"cudnnGetVersion\"); }
size_t cudnnGetCudartVersion(void) { return forward(\"cudnnGetCudartVersion\"); }
#define F(name) int name(void) { return 1; }
F(cudnnGetErrorString) F(cudnnCreate) F(cudnnDestroy) F(cudnnSetStream) F(cudnnBackendCreateDescriptor)
F(cudnnBackendDestroyDescriptor) F(cudnnBackendFinalize) F(cudnnBackendSetAttribute) F(cudnnBackendGetAttribute)
F(cudnnBackendExecute) F(cudnnCreateTensorDescriptor) F(cudnnDestroyTensorDescriptor) F(cudnnSetTensor4dDescriptor)
F(cudnnCreateFilterDescriptor) F(cudnnDestroyFilterDescriptor) F(cudnnSetFilter4dDescriptor)
F(cudnnCreateConvolutionDescriptor) F(cudnnDestroyConvolutionDescriptor) F(cudnnSetConvolution2dDescriptor)
F(cudnnSetConvolutionGroupCount) F(cudnnSetConvolutionMathType) F(cudnnCreateActivationDescriptor)
F(cudnnDestroyActivationDescriptor) F(cudnnSetActivationDescriptor) F(cudnnGetConvolutionForwardWorkspaceSize)
F(cudnnGetConvolutionBackwardDataWorkspaceSize) F(cudnnGetConvolutionBackwardFilterWorkspaceSize)
F(cudnnConvolutionForward) F(cudnnConvolutionBiasActivationForward) F(cudnnConvolutionBackwardData)
F(cudnnConvolutionBackwardFilter)";

/// As above, of cuBLASLt.
const CUBLASLT: &str = "#include <stddef.h>
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return NUMBER; }
#define F(name) int name(void) { return 1; }
F(cublasLtGetStatusName) F(cublasLtCreate) F(cublasLtDestroy) F(cublasLtMatrixLayoutCreate)
F(cublasLtMatrixLayoutSetAttribute) F(cublasLtMatrixLayoutDestroy) F(cublasLtMatmulDescCreate)
F(cublasLtMatmulDescSetAttribute) F(cublasLtMatmulDescDestroy) F(cublasLtMatmulPreferenceCreate)
F(cublasLtMatmulPreferenceSetAttribute) F(cublasLtMatmulPreferenceDestroy) F(cublasLtMatmulAlgoGetHeuristic)
F(cublasLtMatmul)";

/// A folder of a test's own, with a made-up driver; gone with the value.
struct Machine(PathBuf);

impl Machine {
    /// `None` without a C compiler.
    fn new(test: &str) -> Option<Self> {
        let root =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("home")).unwrap();
        let machine = Self(root);
        if machine.make("driver/libcuda.so.1", DRIVER, &[]).is_none() {
            skip::skipped(test, "no C compiler");
            return None;
        }
        std::fs::copy(
            machine.0.join("driver/libcuda.so.1"),
            machine.0.join("driver/libcuda.so"),
        )
        .unwrap();
        Some(machine)
    }

    /// Makes a library.
    fn make(&self, file: &str, text: &str, defines: &[&str]) -> Option<()> {
        let path = self.0.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let source = self.0.join("made.c");
        std::fs::write(&source, text).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-w", "-o"])
            .arg(&path)
            .arg(&source)
            .args(defines);
        cc.status()
            .ok()
            .filter(|status| status.success())
            .map(|_| ())
    }

    fn nvrtc(&self, file: &str, major: u32, minor: u32) {
        let defines = [format!("-DMAJOR={major}"), format!("-DMINOR={minor}")];
        self.make(file, NVRTC, &[&defines[0], &defines[1]]).unwrap();
    }

    /// A cuDNN of this number, such as 91400, in a folder; `made_for` as drivers count.
    fn cudnn(&self, folder: &str, number: usize, made_for: u32) {
        let defines = [
            format!("-DNUMBER={number}"),
            format!("-DMADE_FOR={made_for}"),
        ];
        let options = [
            &defines[0][..],
            &defines[1],
            "-Wl,-soname,libcudnn_graph.so.9",
            "-Wl,-z,nodelete",
        ];
        self.make(
            &format!("{folder}/libcudnn_graph.so.9"),
            CUDNN_GRAPH,
            &options,
        )
        .unwrap();
        let numbers = format!("-DNUMBERS=\"{}\"", library::cudnn_version(number));
        let options = [
            &numbers[..],
            "-Wl,-soname,libcudnn.so.9",
            "-Wl,-rpath,$ORIGIN",
            "-ldl",
        ];
        self.make(&format!("{folder}/libcudnn.so.9"), CUDNN, &options)
            .unwrap();
    }

    /// The answer of a process with these variables, whose paths are below the root. `driver` as
    /// drivers count.
    fn ask(&self, question: &str, driver: u32, variables: &[(&str, &str)]) -> String {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--ignored", "--nocapture"]);
        command
            .env_clear()
            .env(ASKED, question)
            .env("FAKE_DRIVER", driver.to_string());
        command.env("HOME", self.0.join("home"));
        let mut loader = vec![self.0.join("driver")];
        for (name, value) in variables {
            let paths = value.split(':').map(|path| match path {
                "only" | "off" => PathBuf::from(path),
                _ => self.0.join(path),
            });
            match *name {
                "LD_LIBRARY_PATH" => loader.extend(paths),
                "FAKE_CARD" => {
                    command.env(name, value);
                }
                _ => {
                    command.env(name, std::env::join_paths(paths).unwrap());
                }
            }
        }
        command.env("LD_LIBRARY_PATH", std::env::join_paths(loader).unwrap());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let told = text.lines().find_map(|line| line.split_once("answer: "));
        let told = told
            .unwrap_or_else(|| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)))
            .1;
        told.replace(&format!("{}/", self.0.display()), "")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
#[ignore = "run by the others"]
#[expect(clippy::print_stdout, reason = "the answer")]
fn child() {
    let Ok(question) = std::env::var(ASKED) else {
        return;
    };
    let told = |error: Error| error.to_string().replace('\n', "<newline>");
    let answer = match question.as_str() {
        "driver" => library::driver().map_or_else(told, |version| version.to_string()),
        "nvrtc" => library::nvrtc().map_or_else(told, |found| found.path().display().to_string()),
        "cublaslt" => library::cublaslt().map_or_else(told, |found| {
            format!("{} {}", found.version(), found.path().display())
        }),
        "cudnn" => library::cudnn().map_or_else(told, |found| {
            format!("{} {}", found.version(), found.path().display())
        }),
        "note" => Cuda::attention_note().unwrap_or_else(|| "none".to_owned()),
        arch => {
            let unit = Unit::new("made", "extern \"C\" __global__ void made() {}", "made");
            compile::check(&unit, arch).map_or_else(told, |bytes| format!("{bytes} bytes"))
        }
    };
    println!("answer: {answer}");
}

/// What the user lists beats everything, and the loader's places do not hide an environment.
#[test]
fn files_are_taken_in_the_order_of_search() {
    let Some(machine) = Machine::new("order") else {
        return;
    };
    let places = [
        ("ROUNDPIPE_CUDA_LIBS", "mine", "mine/libnvrtc.so.12"),
        ("CUDA_HOME", "toolkit", "toolkit/lib64/libnvrtc.so.12"),
        (
            "VIRTUAL_ENV",
            "venv",
            "venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        ),
        ("CONDA_PREFIX", "conda", "conda/lib/libnvrtc.so.12"),
        ("LD_LIBRARY_PATH", "system", "system/libnvrtc.so.12"),
        (
            "PATH",
            "other/bin",
            "other/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        ),
    ];
    for (_, _, file) in places {
        machine.nvrtc(file, 12, 4);
    }
    // As developers have it: a name that hides nothing.
    machine.nvrtc("system/libnvrtc.so", 12, 4);
    std::fs::create_dir_all(machine.0.join("other/bin")).unwrap();
    std::fs::write(machine.0.join("other/bin/python3"), "").unwrap();
    // Where this machine's loader has one of its own, that comes before the last of these.
    let bare = machine.ask("nvrtc", 12_040, &[]).contains("is not here");
    for first in 0..places.len() - usize::from(!bare) {
        let variables: Vec<_> = places[first..]
            .iter()
            .map(|(name, path, _)| (*name, *path))
            .collect();
        assert_eq!(
            machine.ask("nvrtc", 12_040, &variables),
            places[first].2,
            "with {variables:?}"
        );
    }
}

/// Of several majors the newest that the driver runs, wherever it lies; a newer one alone is
/// refused in words.
#[test]
fn libraries_are_not_newer_than_the_driver() {
    let Some(machine) = Machine::new("majors") else {
        return;
    };
    machine.nvrtc("both/libnvrtc.so.12", 12, 4);
    machine.nvrtc("both/libnvrtc.so.13", 13, 0);
    machine.nvrtc("new/libnvrtc.so.13", 13, 0);
    let both = [("ROUNDPIPE_CUDA_LIBS", "both")];
    assert_eq!(machine.ask("nvrtc", 13_000, &both), "both/libnvrtc.so.13");
    assert_eq!(machine.ask("nvrtc", 12_080, &both), "both/libnvrtc.so.12");
    let after = [
        ("ROUNDPIPE_CUDA_LIBS", "new"),
        ("CUDA_HOME", "nowhere"),
        ("LD_LIBRARY_PATH", "both"),
    ];
    assert_eq!(machine.ask("nvrtc", 12_080, &after), "both/libnvrtc.so.12");
    // A link without a number does not hide what it leads to.
    machine.nvrtc("link/libnvrtc.so", 13, 1);
    for (folder, version) in [("new", "CUDA 13"), ("link", "CUDA 13.1")] {
        let why = machine.ask(
            "nvrtc",
            12_040,
            &[("ROUNDPIPE_CUDA_LIBS", &format!("only:{folder}"))],
        );
        for word in [
            folder,
            "libnvrtc.so",
            version,
            "12.4",
            "pip install nvidia-cuda-nvrtc-cu12",
        ] {
            assert!(
                why.contains(word) && !why.contains("<newline>"),
                "{word}: {why}"
            );
        }
    }
}

/// The library of products is compared like the compiler, by the version that it tells.
#[test]
fn products_go_with_the_driver_too() {
    let Some(machine) = Machine::new("products") else {
        return;
    };
    machine
        .make("mine/libcublasLt.so", CUBLASLT, &["-DNUMBER=13020"])
        .unwrap();
    let mine = [("ROUNDPIPE_CUDA_LIBS", "only:mine")];
    assert_eq!(
        machine.ask("cublaslt", 13_000, &mine),
        "13.2 mine/libcublasLt.so"
    );
    let why = machine.ask("cublaslt", 12_040, &mine);
    for word in [
        "mine/libcublasLt.so",
        "13.2",
        "12.4",
        "pip install nvidia-cublas-cu12",
    ] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
}

#[test]
fn a_driver_that_is_too_old_is_refused_in_one_line() {
    let Some(machine) = Machine::new("old-driver") else {
        return;
    };
    assert_eq!(machine.ask("driver", 12_000, &[]), "12.0");
    let why = machine.ask("driver", 11_080, &[]);
    for word in ["11.8", "12.0", "update it", "run on the CPU"] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
}

/// One line with the file and the function; a whole library further on is used instead.
#[test]
fn a_library_without_a_function_is_passed_over() {
    let Some(machine) = Machine::new("lacks") else {
        return;
    };
    let defines = ["-DMAJOR=12", "-DMINOR=4", "-DWITHOUT_CUBIN"];
    machine
        .make("half/libnvrtc.so.12", NVRTC, &defines)
        .unwrap();
    let why = machine.ask("nvrtc", 12_040, &[("ROUNDPIPE_CUDA_LIBS", "only:half")]);
    for word in [
        "half/libnvrtc.so.12",
        "nvrtcGetCUBIN",
        "nvidia-cuda-nvrtc-cu12",
    ] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
    machine.nvrtc("whole/libnvrtc.so.12", 12, 4);
    let variables = [("ROUNDPIPE_CUDA_LIBS", "half:whole")];
    assert_eq!(
        machine.ask("nvrtc", 12_040, &variables),
        "whole/libnvrtc.so.12"
    );
}

/// A card that the compiler is too old for is an error before anything is compiled, with both
/// versions and the file.
#[test]
fn a_compiler_that_does_not_know_the_card_says_so() {
    let Some(machine) = Machine::new("card") else {
        return;
    };
    machine.nvrtc("old/libnvrtc.so.12", 12, 4);
    let old = [("ROUNDPIPE_CUDA_LIBS", "old")];
    let why = machine.ask("sm_120", 12_080, &old);
    for word in [
        "old/libnvrtc.so.12",
        "12.4",
        "sm_120",
        "12.8 or newer",
        "nvidia-cuda-nvrtc-cu12",
    ] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
    // A card that it knows reaches the compiler, which is made up.
    assert!(machine.ask("sm_90", 12_080, &old).contains("made up"));
}

/// cuDNN that is missing, too old or for another CUDA is not dropped in silence.
#[test]
fn what_is_wrong_with_cudnn_is_told() {
    let Some(machine) = Machine::new("cudnn") else {
        return;
    };
    machine.nvrtc("mine/libnvrtc.so.12", 12, 4);
    let mine = [("ROUNDPIPE_CUDA_LIBS", "only:mine")];
    let says = |note: &str, words: &[&str]| {
        for word in words.iter().chain(&["our own kernels"]) {
            assert!(
                note.contains(word) && !note.contains('\n'),
                "{word}: {note}"
            );
        }
    };
    says(
        &machine.ask("note", 12_040, &mine),
        &["libcudnn", "nvidia-cudnn-cu12"],
    );
    let file = "mine/libcudnn.so.9";
    for (made_for, number, words) in [
        (
            12_040,
            91_002,
            &["9.10.2", "9.14.0", file, "nvidia-cudnn-cu12"][..],
        ),
        (13_000, 91_500, &["13.0", "12.4", file, "nvidia-cudnn-cu12"]),
    ] {
        machine.cudnn("mine", number, made_for);
        says(&machine.ask("note", 12_040, &mine), words);
    }
    machine.cudnn("mine", 91_400, 12_040);
    assert_eq!(machine.ask("note", 12_040, &mine), "none");
    assert_eq!(machine.ask("cudnn", 12_040, &mine), format!("12.4 {file}"));
    // Of version 8 the parts have other names.
    std::fs::create_dir_all(machine.0.join("eight")).unwrap();
    std::fs::copy(machine.0.join(file), machine.0.join("eight/libcudnn.so.8")).unwrap();
    let why = machine.ask("cudnn", 12_040, &[("ROUNDPIPE_CUDA_LIBS", "only:eight")]);
    assert!(
        why.contains("eight/libcudnn.so.8 is cuDNN 8") && why.contains("nvidia-cudnn-cu12"),
        "{why}"
    );
}

/// A cuDNN that was looked at and refused leaves nothing behind that the next would take for its
/// own.
#[test]
fn a_cudnn_that_is_passed_over_does_not_stay_in_the_way() {
    let Some(machine) = Machine::new("cudnn-next") else {
        return;
    };
    machine.cudnn("new", 91_900, 13_010);
    machine.cudnn("old", 91_002, 12_030);
    machine.cudnn("good", 91_500, 12_040);
    for before in ["new", "old", "new:old"] {
        let list = format!("only:{before}:good");
        let found = machine.ask("cudnn", 12_080, &[("ROUNDPIPE_CUDA_LIBS", &list)]);
        assert_eq!(found, "12.4 good/libcudnn.so.9", "with {list}");
    }
    // An old one is better than none, for convolutions.
    let found = machine.ask("cudnn", 12_080, &[("ROUNDPIPE_CUDA_LIBS", "only:new:old")]);
    assert_eq!(found, "12.3 old/libcudnn.so.9");
    // Found by the loader, behind one that is refused.
    let by_name = [("ROUNDPIPE_CUDA_LIBS", "new"), ("LD_LIBRARY_PATH", "good")];
    assert_eq!(
        machine.ask("cudnn", 12_080, &by_name),
        "12.4 good/libcudnn.so.9"
    );
}

/// The first file alone would end the process as soon as it is asked anything.
#[test]
fn a_cudnn_without_its_parts_is_refused_before_it_is_asked() {
    let Some(machine) = Machine::new("cudnn-lone") else {
        return;
    };
    machine.cudnn("lone", 91_500, 12_040);
    machine.cudnn("good", 91_500, 12_040);
    std::fs::remove_file(machine.0.join("lone/libcudnn_graph.so.9")).unwrap();
    let why = machine.ask("cudnn", 12_080, &[("ROUNDPIPE_CUDA_LIBS", "only:lone")]);
    for word in [
        "lone/libcudnn.so.9",
        "libcudnn_graph.so.9",
        "nvidia-cudnn-cu12",
    ] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
    let found = machine.ask(
        "cudnn",
        12_080,
        &[("ROUNDPIPE_CUDA_LIBS", "only:lone:good")],
    );
    assert_eq!(found, "12.4 good/libcudnn.so.9");
    // By name the parts may come from elsewhere; then so does the first file.
    let found = machine.ask("cudnn", 12_080, &[("LD_LIBRARY_PATH", "lone:good")]);
    assert_eq!(found, "12.4 good/libcudnn.so.9");
    // Where this machine's loader has one of its own, that is found instead.
    let found = machine.ask("cudnn", 12_080, &[("LD_LIBRARY_PATH", "lone")]);
    assert!(
        found.contains("libcudnn_graph.so.9") || found.ends_with("libcudnn.so.9"),
        "{found}"
    );
    std::fs::write(machine.0.join("lone/libcudnn_graph.so.9"), "no library").unwrap();
    let why = machine.ask("cudnn", 12_080, &[("ROUNDPIPE_CUDA_LIBS", "only:lone")]);
    assert!(
        why.contains("cannot load") && why.contains("lone/libcudnn_graph.so.9"),
        "{why}"
    );
}

/// The loader prefers its own path to the folder of the file that asks; what was chosen is used all
/// the same.
#[test]
fn the_parts_of_cudnn_are_those_beside_it() {
    let Some(machine) = Machine::new("cudnn-parts") else {
        return;
    };
    machine.cudnn("mine", 91_500, 12_040);
    machine.cudnn("other", 91_500, 12_030);
    let both = [
        ("ROUNDPIPE_CUDA_LIBS", "mine"),
        ("LD_LIBRARY_PATH", "other"),
    ];
    assert_eq!(
        machine.ask("cudnn", 12_080, &both),
        "12.4 mine/libcudnn.so.9"
    );
    // Under all its numbers the other would be asked first: then it is taken whole, or nothing is.
    let numbered = machine.0.join("other/libcudnn_graph.so.9.15.0");
    std::os::unix::fs::symlink("libcudnn_graph.so.9", &numbered).unwrap();
    assert_eq!(
        machine.ask("cudnn", 12_080, &both),
        "12.3 other/libcudnn.so.9"
    );
    let only = [
        ("ROUNDPIPE_CUDA_LIBS", "only:mine"),
        ("LD_LIBRARY_PATH", "other"),
    ];
    let why = machine.ask("cudnn", 12_080, &only);
    for word in [
        "mine/libcudnn_graph.so.9",
        "other/libcudnn_graph.so.9.15.0",
        "LD_LIBRARY_PATH",
    ] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
    // A link to the folder's own file is no other library.
    std::os::unix::fs::symlink(
        "libcudnn_graph.so.9",
        machine.0.join("mine/libcudnn_graph.so.9.15.0"),
    )
    .unwrap();
    let own = [
        ("ROUNDPIPE_CUDA_LIBS", "mine"),
        ("LD_LIBRARY_PATH", "mine:other"),
    ];
    assert_eq!(
        machine.ask("cudnn", 12_080, &own),
        "12.4 mine/libcudnn.so.9"
    );
}

/// Of compilers that go with the driver, the first that knows the card; where none does, the first.
#[test]
fn a_compiler_that_knows_the_card_comes_before_one_that_does_not() {
    let Some(machine) = Machine::new("cards") else {
        return;
    };
    machine.nvrtc("old/libnvrtc.so.12", 12, 4);
    machine.nvrtc("new/libnvrtc.so.12", 12, 9);
    for (list, card, want) in [
        ("only:old:new", "120", "new"),
        ("only:old:new", "90", "old"),
        ("only:old:new", "70", "old"),
        ("only:old", "120", "old"),
        ("only:new:old", "90", "new"),
    ] {
        let variables = [("ROUNDPIPE_CUDA_LIBS", list), ("FAKE_CARD", card)];
        let found = machine.ask("nvrtc", 12_090, &variables);
        assert_eq!(
            found,
            format!("{want}/libnvrtc.so.12"),
            "{list} on sm_{card}"
        );
    }
}

/// `only` is about the libraries that we choose; the driver has a switch of its own.
#[test]
fn the_driver_is_left_out_by_its_own_variable() {
    let Some(machine) = Machine::new("no-driver") else {
        return;
    };
    let only = ("ROUNDPIPE_CUDA_LIBS", "only:nothing");
    assert_eq!(machine.ask("driver", 12_080, &[only]), "12.8");
    let why = machine.ask("driver", 12_080, &[("ROUNDPIPE_CUDA_DRIVER", "off")]);
    for word in ["ROUNDPIPE_CUDA_DRIVER=off", "run on the CPU"] {
        assert!(
            why.contains(word) && !why.contains("<newline>"),
            "{word}: {why}"
        );
    }
}
