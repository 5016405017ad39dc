//! Inputs that cannot work: settings, arguments, data, models, templates and folders of runs. Each
//! gets one line that names the place and the fix, and the right exit code; it changes no file, and
//! takes no more memory than its size asks for.

mod kit;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kit::{Run, text};
use serde_json::{Value, json};

/// KiB of addresses that a case may take. A model of 30,000 weights and a page of examples leave
/// most of it free, on a machine with many processors too.
#[cfg(target_os = "linux")]
const MOST_KIB: u64 = 3 << 20;
/// The longest line of an error, in bytes.
const LONGEST_LINE: usize = 2000;

/// A command, how it must end, and what its line must say.
struct Case {
    name: String,
    folder: PathBuf,
    arguments: Vec<String>,
    code: i32,
    says: Vec<String>,
    /// Files that are there before, and must be the same afterwards; `None` where it is seen only
    /// when steps were made.
    before: Option<BTreeMap<String, Vec<u8>>>,
}

/// Cases and the files that they need.
struct Table {
    run: Run,
    /// A run of two steps, finished.
    finished: PathBuf,
    cases: Vec<Case>,
}

/// Quick to train, if it were not refused.
const SMALL: [&str; 7] = [
    "steps=2",
    "batch=2",
    "sample_every=0",
    "devices=cpu",
    "data_threads=0",
    "validation=off",
    "gpu_memory=256MiB",
];

impl Table {
    fn new(name: &str) -> Self {
        let run = Run::new(name);
        run.model();
        run.chats(20);
        let finished = PathBuf::from(run.path("finished"));
        let done = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
            .args(["train", "model", "chats.jsonl", "--out", "finished"])
            .args(["save_every=1", "keep=2"])
            .args(SMALL)
            .current_dir(run.path(""))
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
        Self {
            run,
            finished,
            cases: Vec::new(),
        }
    }

    /// A case whose command runs in a folder of its own, which `files` fills.
    fn add(
        &mut self,
        name: &str,
        files: impl FnOnce(&Path),
        arguments: &[&str],
        code: i32,
        says: &[&str],
    ) {
        let folder = PathBuf::from(self.run.path(&format!("case-{}", self.cases.len())));
        fs::create_dir(&folder).unwrap();
        files(&folder);
        self.cases.push(Case {
            name: name.chars().take(100).collect(),
            before: Some(tree(&folder)),
            folder,
            arguments: arguments.iter().map(ToString::to_string).collect(),
            code,
            says: says.iter().map(ToString::to_string).collect(),
        });
    }

    /// A file of settings, refused as usage.
    fn config(&mut self, bytes: impl AsRef<[u8]>, says: &[&str]) {
        let bytes = bytes.as_ref();
        let name = format!("config: {}", text(bytes).lines().next().unwrap_or_default());
        let write = |folder: &Path| fs::write(folder.join("c.toml"), bytes).unwrap();
        let arguments = [
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--config",
            "c.toml",
        ];
        let says: Vec<&str> = says.iter().copied().chain(["c.toml"]).collect();
        self.add(&name, write, &arguments, 2, &says);
    }

    /// Settings as arguments.
    fn settings(&mut self, settings: &[&str], code: i32, says: &[&str]) {
        let mut arguments = vec!["train", "../model", "../chats.jsonl", "--out", "run"];
        arguments.extend(SMALL);
        arguments.extend(settings);
        self.add(&settings.join(" "), |_| {}, &arguments, code, says);
    }

    /// A file of examples with this name.
    fn data(
        &mut self,
        name: &str,
        bytes: impl AsRef<[u8]>,
        settings: &[&str],
        code: i32,
        says: &[&str],
    ) {
        let bytes = bytes.as_ref();
        let title = format!(
            "data {name}: {} {settings:?}",
            text(&bytes[..bytes.len().min(70)])
        );
        let write = |folder: &Path| fs::write(folder.join(name), bytes).unwrap();
        let mut arguments = vec!["train", "../model", name, "--out", "run"];
        arguments.extend(SMALL);
        arguments.extend(settings);
        self.add(&title, write, &arguments, code, says);
    }

    /// Rows of JSON lines, all but one sound.
    fn row(&mut self, row: &str, says: &[&str]) {
        let sound = json!({"messages": [
            {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]});
        let says: Vec<&str> = says
            .iter()
            .copied()
            .chain(["rows.jsonl: row 3: "])
            .collect();
        self.data(
            "rows.jsonl",
            format!("{sound}\n\n{sound}\n{row}\n{sound}\n"),
            &[],
            1,
            &says,
        );
    }

    /// A copy of the model with something wrong.
    fn model(&mut self, name: &str, change: impl FnOnce(&Path), says: &[&str]) {
        let model = PathBuf::from(self.run.path("model"));
        let mut arguments = vec!["train", "broken", "../chats.jsonl", "--out", "run"];
        arguments.extend(SMALL);
        let files = |folder: &Path| {
            copy(&model, &folder.join("broken"));
            change(&folder.join("broken"));
        };
        self.add(&format!("model: {name}"), files, &arguments, 1, says);
    }

    /// A copy of a finished run with something wrong, which is to go on for a third step.
    fn resume(
        &mut self,
        name: &str,
        change: impl FnOnce(&Path),
        more: &[&str],
        code: i32,
        says: &[&str],
    ) {
        let finished = self.finished.clone();
        let mut arguments = vec!["train", "--out", "run"];
        arguments.extend(more);
        let files = |folder: &Path| {
            copy(&finished, &folder.join("run"));
            change(&folder.join("run"));
        };
        self.add(
            &format!("resume: {name} {more:?}"),
            files,
            &arguments,
            code,
            says,
        );
    }

    fn arguments(&mut self, arguments: &[&str], code: i32, says: &[&str]) {
        self.add(&arguments.join(" "), |_| {}, arguments, code, says);
    }

    fn check(&self) -> Vec<String> {
        let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            while let Some(case) = self.cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(why) = case.check() {
                    wrong
                        .lock()
                        .unwrap()
                        .push(format!("{}\n    {why}", case.name));
                }
            }
        };
        std::thread::scope(|scope| {
            (0..4).for_each(|_| {
                scope.spawn(work);
            });
        });
        wrong.into_inner().unwrap()
    }
}

impl Case {
    fn check(&self) -> Result<(), String> {
        let output = bounded(&self.folder, &self.arguments);
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        let said = || {
            format!(
                "code {:?}\n    out: {out}\n    error: {error}",
                output.status.code()
            )
        };
        let lines: Vec<&str> = error
            .lines()
            .filter(|line| line.starts_with("error: "))
            .collect();
        let [line] = lines[..] else {
            return Err(format!("not one line: {}", said()));
        };
        if output.status.code() != Some(self.code) {
            return Err(format!("not {}: {}", self.code, said()));
        }
        if let Some(word) = self.says.iter().find(|word| !line.contains(*word)) {
            return Err(format!("`{word}` is missing: {}", said()));
        }
        let is_clean = |c: char| !c.is_control();
        if line.len() > LONGEST_LINE || !line.chars().all(is_clean) || error.contains("panicked") {
            return Err(format!("a line that is no line: {}", said()));
        }
        let after = tree(&self.folder);
        match &self.before {
            Some(before) if *before != after => {
                let is_other = |name: &&String| before.get(*name) != after.get(*name);
                let names: Vec<_> = before.keys().chain(after.keys()).filter(is_other).collect();
                Err(format!("{names:?} changed: {}", said()))
            }
            _ => Ok(()),
        }
    }
}

/// Runs the program in a folder, with a bound on its memory where the system has one.
fn bounded(folder: &Path, arguments: &[String]) -> Output {
    #[cfg(target_os = "linux")]
    let mut command = {
        let mut shell = Command::new("sh");
        let line = format!("ulimit -v {MOST_KIB} && exec \"$0\" \"$@\"");
        shell.args(["-c", &line, env!("CARGO_BIN_EXE_roundpipe")]);
        shell
    };
    #[cfg(not(target_os = "linux"))]
    let mut command = Command::new(env!("CARGO_BIN_EXE_roundpipe"));
    // The system's allocator keeps addresses for every thread, used or not.
    command.env("MALLOC_ARENA_MAX", "2").stdin(Stdio::null());
    // Nothing is fetched: a hub id that is not there is not there.
    command
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", folder.join("hub"));
    command
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

/// Every file below a folder but the lock, and what is in it.
fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().display().to_string();
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            if kind.is_dir() {
                found.insert(name, Vec::new());
                folders.push(path);
            } else if kind.is_file() && !name.ends_with("/lock") {
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    found
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &name);
        } else {
            fs::copy(&path, &name).unwrap();
        }
    }
}

/// Changes a JSON file.
fn edit(file: PathBuf, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

/// Changes the bytes of a file.
fn bytes(file: PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(&file).unwrap();
    change(&mut bytes);
    fs::write(file, bytes).unwrap();
}

/// Changes the header of a safetensors file.
fn header(file: PathBuf, change: impl FnOnce(&mut Value)) {
    bytes(file, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut value: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        change(&mut value);
        let header = value.to_string();
        let mut new = (header.len() as u64).to_le_bytes().to_vec();
        new.extend(header.bytes());
        new.extend(&bytes[8 + length..]);
        *bytes = new;
    });
}

fn pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

fn configs(t: &mut Table) {
    t.config("lr = ", &["line 1"]);
    t.config("lr 1", &["line 1"]);
    t.config("# fine\nlr = 1e-4\nbatch = [1,\n", &["line"]);
    t.config("a = \"open", &["line 1"]);
    t.config("steps = 1\nsteps = 2\n", &["line 2", "duplicate"]);
    t.config("[train]\nlr = 1\n", &["line 1", "train"]);
    t.config("[[groups]]\nlr_factor = 1.0\n", &["line 1", "no `match`"]);
    t.config("\n\nlearning_rate = 1e-4\n", &["line 3", "`lr`"]);
    t.config("batch_size = 4\n", &["line 1", "`batch`"]);
    t.config("max_steps = 4\n", &["line 1", "`steps`"]);
    t.config("warm-up = 4\n", &["line 1", "`warmup`"]);
    t.config("LR = 4\n", &["line 1", "`lr`"]);
    t.config("lr = \"fast\"\n", &["line 1", "must be a number"]);
    t.config("lr = [1e-4]\n", &["line 1", "must be a number"]);
    t.config("lr = nan\n", &["line 1", "finite"]);
    t.config("lr = inf\n", &["line 1", "finite"]);
    t.config("lr = 2026-01-01\n", &["line 1", "must be a number"]);
    t.config("steps = 1.5\n", &["line 1", "whole number"]);
    t.config("steps = -3\n", &["line 1", "whole number"]);
    t.config("steps = \"ten\"\n", &["line 1", "whole number"]);
    t.config("steps = 99999999999999999999\n", &["line 1"]);
    t.config("data = 3\n", &["line 1", "text"]);
    t.config("data = [\"a\", 3]\n", &["line 1", "text"]);
    t.config("model = true\n", &["line 1", "text"]);
    t.config("packing = \"yes\"\n", &["line 1", "true or false"]);
    t.config("packing = 1\n", &["line 1", "true or false"]);
    t.config("method = \"qlora\"\n", &["line 1", "full, lora"]);
    t.config("schedule = \"\"\n", &["line 1", "cosine"]);
    t.config("optimizer = \"adamw8bit\"\n", &["line 1", "adamw"]);
    t.config("dtype = \"fp8\"\n", &["line 1", "bf16"]);
    t.config("gpu_memory = 24\n", &["line 1", "size"]);
    t.config("gpu_memory = \"24 lots\"\n", &["line 1", "size"]);
    t.config("host_memory = \"-1GiB\"\n", &["line 1", "size"]);
    t.config("validation = -1\n", &["line 1", "share"]);
    t.config("validation = 1.5\n", &["line 1", "share"]);
    t.config("validation = [1]\n", &["line 1", "share"]);
    t.config("validation = \"\"\n", &["line 1", "share"]);
    t.config("groups = 1\n", &["line 1", "list"]);
    t.config("groups = [1]\n", &["line 1", "list"]);
    t.config("groups = [{ match = 1 }]\n", &["line 1", "match"]);
    t.config(
        "groups = [{ match = \"a\", lr = 1 }]\n",
        &["line 1", "`lr`"],
    );
    t.config("prompts = [1, 2]\n", &["line 1", "text"]);
    t.config("model = \"\"\n", &["line 1", "model"]);
    t.config("steps = 3\nepochs = 2\n", &["line", "epochs"]);
    t.config("warmup = 30\nsteps = 4\n", &["line 1", "warmup 30"]);
    t.config("# a\nlag = 7\n", &["line 2", "lag 7"]);
    // What is not shown as it is takes three times its bytes in run.toml.
    let prompt = "\u{85}".repeat(400_000);
    let long = format!("steps = 1\ngpu_memory = \"256MiB\"\nprompts = [\"{prompt}\"]\n");
    t.add(
        "settings that grow",
        |folder| fs::write(folder.join("c.toml"), long).unwrap(),
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--config",
            "c.toml",
        ],
        2,
        &["run.toml", "shorter prompts"],
    );
    t.config(b"lr = \"\xff\xfe\"", &["UTF-8"]);
    t.config(b"\x7fELF\x02\x01\x01\x00\x00", &["line 1"]);
    t.config(vec![b'#'; 2 << 20], &["bytes"]);
    t.config("[".repeat(100_000), &["line 1"]);
    t.config("a=[".repeat(50_000), &["line 1"]);
    t.config(format!("{} = 1\n", "k".repeat(100_000)), &["line 1"]);
    t.config("\"a\\nb\\u001b[31m\" = 1\n", &["line 1", "no setting"]);
}

fn settings(t: &mut Table) {
    t.settings(&["steps=0"], 2, &["steps"]);
    t.settings(&["steps=9223372036854775807"], 2, &["steps"]);
    t.settings(&["steps=auto", "epochs=0"], 2, &["epochs"]);
    t.settings(
        &["steps=auto", "epochs=9223372036854775807"],
        2,
        &["epochs"],
    );
    t.settings(&["warmup=3"], 2, &["warmup"]);
    t.settings(&["lag=2"], 2, &["lag"]);
    t.settings(&["keep=0"], 2, &["keep"]);
    t.settings(&["stages=0"], 2, &["stages"]);
    t.settings(&["--lora", "method=full"], 2, &["--lora", "method=full"]);
    t.settings(&["stages=99"], 2, &["stages"]);
    t.settings(&["batch=0"], 2, &["batch"]);
    t.settings(&["batch=1000000000000"], 2, &["batch"]);
    t.settings(
        &["batch=1000000", "host_memory=1GiB"],
        3,
        &["batch", "fewer"],
    );
    t.settings(&["seq=0"], 2, &["seq"]);
    t.settings(&["seq=257"], 2, &["seq", "256"]);
    t.settings(&["seq=1099511627776"], 2, &["seq"]);
    t.settings(&["microbatches=0"], 2, &["microbatches"]);
    t.settings(&["lr=-1"], 2, &["lr"]);
    t.settings(&["lr=1e300"], 2, &["lr"]);
    t.settings(&["min_lr=2"], 2, &["min_lr"]);
    t.settings(&["decay=-1"], 2, &["decay"]);
    t.settings(&["schedule=wsd", "decay=0"], 2, &["decay"]);
    t.settings(&["clip=-1"], 2, &["clip"]);
    t.settings(&["label_smoothing=1.5"], 2, &["label_smoothing"]);
    t.settings(&["neftune=-5"], 2, &["neftune"]);
    t.settings(&["weight_decay=-0.1"], 2, &["weight_decay"]);
    t.settings(&["beta1=1"], 2, &["beta1"]);
    t.settings(&["beta2=-1"], 2, &["beta2"]);
    t.settings(&["optimizer=sgd", "momentum=2"], 2, &["momentum"]);
    t.settings(
        &["groups=[{match=\"*nothing*\", freeze=true}]"],
        2,
        &["*nothing*"],
    );
    t.settings(&["groups=[{match=\"*\", freeze=true}]"], 2, &["groups"]);
    t.settings(&["groups=[{match=\"*\", lr_factor=-1}]"], 2, &["lr_factor"]);
    t.settings(&["method=lora", "lora_rank=0"], 2, &["rank"]);
    t.settings(&["method=lora", "lora_rank=1000000000000"], 2, &["rank"]);
    t.settings(
        &["method=lora", "lora_targets=[\"nothing\"]"],
        2,
        &["nothing"],
    );
    t.settings(&["method=lora", "lora_targets=[]"], 2, &["lora_targets"]);
    t.settings(&["method=lora", "lora_rank=100000"], 2, &["lora_rank"]);
    t.settings(&["method=lora", "lora_dropout=1"], 2, &["dropout"]);
    t.settings(&["method=lora", "lora_alpha=-1"], 2, &["alpha"]);
    t.settings(&["state_dtype=f16"], 2, &["state_dtype"]);
    t.settings(&["moments=4bit"], 2, &["moments", "8bit"]);
    t.settings(&["state_dtype=bf16", "moments=8bit"], 2, &["moments"]);
    t.settings(&["devices=tpu"], 2, &["devices"]);
    t.settings(&["devices=cpu:0"], 2, &["devices"]);
    t.settings(&["devices=cpu:100000"], 2, &["devices"]);
    t.settings(&["devices=cuda:77"], 2, &["devices"]);
    t.settings(&["devices="], 2, &["devices"]);
    t.settings(&["gpu_memory=1KiB"], 3, &["1"]);
    t.settings(&["host_memory=100KiB"], 3, &["host_memory"]);
    t.settings(&["sample_tokens=1000000000000"], 2, &["sample_tokens"]);
    t.settings(&["sample_temperature=-1"], 2, &["sample_temperature"]);
    t.settings(&["patience=2"], 2, &["patience", "validation"]);
    t.settings(&["data_threads=1000000"], 2, &["data_threads"]);
    t.settings(&["init=tiny", "model=../model"], 2, &["init", "model"]);
    t.settings(&["format=sharegpt"], 1, &["chats.jsonl", "row 1"]);
    t.settings(&["validation=20"], 2, &["validation"]);
    t.settings(&["validation=0.9999"], 2, &["validation"]);
    t.settings(&["validation=nothere.jsonl"], 1, &["nothere.jsonl"]);
    t.settings(
        &["template=nothere.jinja"],
        2,
        &["template", "nothere.jinja"],
    );
    t.settings(&["tokenizer=../model"], 2, &["tokenizer", "init"]);
    t.settings(&["seq=4", "too_long=drop"], 1, &["chats.jsonl"]);
}

fn data(t: &mut Table) {
    // Rows of conversations.
    t.row("{", &["JSON"]);
    t.row("{\"messages\": [}", &["JSON"]);
    t.row("[1, 2]", &["list", "object"]);
    t.row("null", &["null", "object"]);
    t.row("\"text\"", &["object"]);
    t.row("{}", &["messages"]);
    t.row("{\"text\": \"a\"}", &["messages"]);
    t.row("{\"messages\": null}", &["messages"]);
    t.row("{\"messages\": \"hello\"}", &["messages"]);
    t.row("{\"messages\": []}", &["message"]);
    t.row("{\"messages\": [1]}", &["message"]);
    t.row("{\"messages\": [{\"role\": \"user\"}]}", &[""]);
    t.row("{\"messages\": [{\"content\": \"a\"}]}", &["role"]);
    t.row(
        "{\"messages\": [{\"role\": 3, \"content\": \"a\"}]}",
        &["role"],
    );
    t.row(
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
        &["assistant"],
    );
    t.row(
        "{\"messages\": [{\"role\": \"system\", \"content\": \"a\"}]}",
        &["assistant"],
    );
    t.row("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": 5}]}", &[""]);
    t.row("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}], \"tools\": 3}", &["tools"]);
    t.row("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"tool_calls\": 7}]}", &["tool_calls"]);
    t.row(
        &format!("{}1{}", "[".repeat(5000), "]".repeat(5000)),
        &["JSON"],
    );
    t.row(
        &format!("{{\"messages\": [{}]}}", vec!["0"; 300_000].join(",")),
        &["values"],
    );
    // Other formats.
    t.data(
        "share.jsonl",
        "{\"conversations\": []}\n",
        &[],
        1,
        &["share.jsonl: row 1: "],
    );
    t.data(
        "share.jsonl",
        "{\"conversations\": [{\"from\": \"human\"}]}\n",
        &[],
        1,
        &["share.jsonl: row 1: ", "value"],
    );
    t.data(
        "share.jsonl",
        "{\"conversations\": [{\"from\": \"alien\", \"value\": \"a\"}]}\n",
        &[],
        1,
        &["share.jsonl: row 1: ", "alien"],
    );
    t.data(
        "alpaca.jsonl",
        "{\"instruction\": \"a\", \"output\": null}\n",
        &[],
        1,
        &["alpaca.jsonl: row 1: ", "output"],
    );
    t.data(
        "alpaca.jsonl",
        "{\"instruction\": 1, \"output\": \"b\"}\n",
        &[],
        1,
        &["alpaca.jsonl: row 1: ", "instruction"],
    );
    t.data(
        "alpaca.json",
        "[{\"instruction\": \"a\", \"output\": \"b\"}, {\"instruction\": \"a\"}]",
        &[],
        1,
        &["alpaca.json: row 2: ", "output"],
    );
    t.data(
        "pc.jsonl",
        "{\"prompt\": \"a\", \"completion\": \"\"}\n",
        &[],
        1,
        &["pc.jsonl: row 1: ", "completion"],
    );
    t.data(
        "pc.jsonl",
        "{\"prompt\": \"a\", \"completion\": 3}\n",
        &[],
        1,
        &["pc.jsonl: row 1: ", "completion"],
    );
    t.data(
        "t.jsonl",
        "{\"text\": \"fine\"}\n{\"text\": \"\"}\n",
        &[],
        1,
        &["t.jsonl: row 2: ", "empty"],
    );
    t.data(
        "t.jsonl",
        "{\"text\": 3}\n",
        &[],
        1,
        &["t.jsonl: row 1: ", "text"],
    );
    t.data(
        "t.jsonl",
        b"{\"text\": \"a\xff\"}\n",
        &[],
        1,
        &["t.jsonl: row 1: "],
    );
    t.data(
        "keys.jsonl",
        "{\"question\": \"a\", \"answer\": \"b\"}\n",
        &[],
        1,
        &["keys.jsonl: row 1: ", "question", "prompt"],
    );
    // Files.
    t.data("none.jsonl", "", &[], 1, &["none.jsonl", "no rows"]);
    t.data("blank.jsonl", "\n \n\n", &[], 1, &["blank.jsonl"]);
    t.data("none.txt", "", &[], 1, &["none.txt"]);
    t.data("none.json", "", &[], 1, &["none.json"]);
    t.data("one.json", "{\"text\": \"a\"", &[], 1, &["one.json"]);
    t.data(
        "list.json",
        "[{\"text\": \"a\"}, {\"text\": ",
        &[],
        1,
        &["list.json"],
    );
    t.data("list.json", "[]", &[], 1, &["list.json"]);
    t.data("t.csv", "a,b\n1,2\n", &[], 1, &["t.csv", "text"]);
    t.data("t.csv", "text\n", &[], 1, &["t.csv"]);
    t.data("t.csv", "prompt,completion\n\"a,b\n", &[], 1, &["t.csv"]);
    t.data(
        "t.csv",
        "prompt,completion\na,b,c\n",
        &[],
        1,
        &["t.csv: row 1"],
    );
    t.data("t.txt", b"\xff\xfe\xfd", &[], 1, &["t.txt"]);
    t.data("t.bin", b"\0\x01\x02\x03", &[], 1, &["t.bin", ".jsonl"]);
    t.data(
        "t.jsonl.gz",
        gzip(b"{\"text\": \"a\"}\n", 6),
        &[],
        1,
        &["t.jsonl.gz"],
    );
    t.data("t.jsonl.gz", b"no gzip at all", &[], 1, &["t.jsonl.gz"]);
    t.data(
        "t.jsonl.zst",
        b"\x28\xb5\x2f\xfd\x04\x58\x01\x02\x03",
        &[],
        1,
        &["t.jsonl.zst"],
    );
    t.data(
        "t.parquet",
        b"PAR1\0\0\0\0\xff\xff\xff\x7fPAR1",
        &[],
        1,
        &["t.parquet"],
    );
    t.data("t.parquet", b"PAR1", &[], 1, &["t.parquet"]);
    let bad = "{\"text\": 1}\n{\"text\": \"\"}\nnothing\n";
    t.data("bad.jsonl", bad, &["bad_rows=skip"], 1, &["bad.jsonl"]);
    t.data(
        "long.jsonl",
        format!("{{\"text\": \"{}\"}}\n", "a".repeat(80 << 20)),
        &[],
        1,
        &["long.jsonl: row 1: "],
    );
    for weight in ["0", "-1", "nan", "inf", "often", ""] {
        let data = format!("../chats.jsonl={weight}");
        let mut arguments = vec!["train", "../model", &data, "--out", "run"];
        arguments.extend(SMALL);
        t.arguments(&arguments, 2, &["weight", "../chats.jsonl"]);
    }
    let train = |data: &'static str| {
        let mut arguments = vec!["train", "../model", data, "--out", "run"];
        arguments.extend(SMALL);
        arguments
    };
    t.add(
        "an empty folder",
        |f| fs::create_dir(f.join("d")).unwrap(),
        &train("d"),
        1,
        &["d: ", ".jsonl"],
    );
    t.add(
        "a folder of others",
        |f| {
            fs::create_dir(f.join("d")).unwrap();
            fs::write(f.join("d/a.png"), "").unwrap();
        },
        &train("d"),
        1,
        &["d: ", ".jsonl"],
    );
    t.add(
        "a pipe",
        |f| pipe(&f.join("p.jsonl")),
        &train("p.jsonl"),
        1,
        &["p.jsonl", "pipe"],
    );
    t.add(
        "a folder with a name",
        |f| fs::create_dir(f.join("d.jsonl")).unwrap(),
        &train("d.jsonl"),
        1,
        &["d.jsonl"],
    );
    t.arguments(&train("nothere.jsonl"), 1, &["nothere.jsonl"]);
    let sound = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    t.add(
        "bad validation rows",
        |f| fs::write(f.join("v.jsonl"), format!("{sound}{{\"prompt\": \"a\"}}\n")).unwrap(),
        &[&train("../chats.jsonl")[..], &["validation=v.jsonl"]].concat(),
        1,
        &["v.jsonl: row 2: ", "completion"],
    );
    t.add(
        "no validation rows",
        |f| fs::write(f.join("v.jsonl"), "").unwrap(),
        &[&train("../chats.jsonl")[..], &["validation=v.jsonl"]].concat(),
        1,
        &["v.jsonl"],
    );
    t.add(
        "validation rows too long",
        |f| {
            fs::write(
                f.join("v.jsonl"),
                format!(
                    "{{\"prompt\": \"{}\", \"completion\": \"b\"}}\n",
                    "a ".repeat(400)
                ),
            )
            .unwrap()
        },
        &[
            &train("../chats.jsonl")[..],
            &["validation=v.jsonl", "too_long=drop", "seq=128"],
        ]
        .concat(),
        1,
        &["v.jsonl"],
    );
}

/// Gzip of bytes, the first of them only.
fn gzip(bytes: &[u8], kept: usize) -> Vec<u8> {
    let length = bytes.len() as u16;
    let mut file = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1];
    file.extend(length.to_le_bytes());
    file.extend((!length).to_le_bytes());
    file.extend(&bytes[..kept]);
    file
}

fn models(t: &mut Table) {
    let weights = |folder: &Path| folder.join("model.safetensors");
    t.model(
        "no config",
        |m| fs::remove_file(m.join("config.json")).unwrap(),
        &["config.json"],
    );
    t.model(
        "config cut",
        |m| bytes(m.join("config.json"), |b| b.truncate(40)),
        &["config.json"],
    );
    t.model(
        "config a list",
        |m| fs::write(m.join("config.json"), "[]").unwrap(),
        &["config.json"],
    );
    t.model(
        "config of binary",
        |m| fs::write(m.join("config.json"), b"\0\xff").unwrap(),
        &["config.json"],
    );
    t.model(
        "config a pipe",
        |m| {
            fs::remove_file(m.join("config.json")).unwrap();
            pipe(&m.join("config.json"));
        },
        &["config.json"],
    );
    t.model(
        "unknown family",
        |m| edit(m.join("config.json"), |c| c["model_type"] = json!("mamba")),
        &["config.json", "mamba"],
    );
    t.model(
        "no family",
        |m| {
            edit(m.join("config.json"), |c| {
                c.as_object_mut().unwrap().remove("model_type");
                c.as_object_mut().unwrap().remove("architectures");
            })
        },
        &["config.json"],
    );
    t.model(
        "no layers",
        |m| edit(m.join("config.json"), |c| c["num_hidden_layers"] = json!(0)),
        &["config.json", "num_hidden_layers"],
    );
    t.model(
        "a layer more",
        |m| edit(m.join("config.json"), |c| c["num_hidden_layers"] = json!(3)),
        &["model.layers.2"],
    );
    t.model(
        "layers without number",
        |m| {
            edit(m.join("config.json"), |c| {
                c["num_hidden_layers"] = json!(4_000_000_000u64)
            })
        },
        &["num_hidden_layers"],
    );
    t.model(
        "wide",
        |m| edit(m.join("config.json"), |c| c["hidden_size"] = json!(64)),
        &["broken"],
    );
    t.model(
        "heads that do not divide",
        |m| {
            edit(m.join("config.json"), |c| {
                c["num_key_value_heads"] = json!(3)
            })
        },
        &["config.json", "num_key_value_heads"],
    );
    t.model(
        "vocab of none",
        |m| edit(m.join("config.json"), |c| c["vocab_size"] = json!(0)),
        &["config.json", "vocab_size"],
    );
    t.model(
        "vocab huge",
        |m| {
            edit(m.join("config.json"), |c| {
                c["vocab_size"] = json!(1u64 << 40)
            })
        },
        &["vocab"],
    );
    t.model(
        "vocab text",
        |m| edit(m.join("config.json"), |c| c["vocab_size"] = json!("many")),
        &["config.json", "vocab_size"],
    );
    t.model(
        "no weights",
        |m| fs::remove_file(weights(m)).unwrap(),
        &["broken", "safetensors"],
    );
    t.model(
        "weights empty",
        |m| fs::write(weights(m), "").unwrap(),
        &["model.safetensors"],
    );
    t.model(
        "weights cut in the header",
        |m| bytes(weights(m), |b| b.truncate(100)),
        &["model.safetensors"],
    );
    t.model(
        "weights cut in the data",
        |m| {
            bytes(weights(m), |b| {
                let l = b.len();
                b.truncate(l - 5)
            })
        },
        &["model.safetensors"],
    );
    t.model(
        "weights with more",
        |m| bytes(weights(m), |b| b.extend([0; 5])),
        &["model.safetensors"],
    );
    t.model(
        "a header of 2^60",
        |m| bytes(weights(m), |b| b[7] = 0x10),
        &["model.safetensors"],
    );
    t.model(
        "a header flipped",
        |m| bytes(weights(m), |b| b[9] ^= 0x20),
        &["model.safetensors"],
    );
    t.model(
        "a pickle",
        |m| {
            fs::rename(weights(m), m.join("pytorch_model.bin")).unwrap();
        },
        &["broken", "pytorch_model.bin"],
    );
    t.model(
        "a tensor less",
        |m| {
            header(weights(m), |h| {
                h.as_object_mut().unwrap().remove("model.norm.weight");
            })
        },
        &["model.safetensors"],
    );
    t.model(
        "another shape",
        |m| {
            header(weights(m), |h| {
                h["model.norm.weight"]["shape"] = json!([2, 16])
            })
        },
        &["model.norm.weight"],
    );
    t.model(
        "another type",
        |m| {
            header(weights(m), |h| {
                h["model.norm.weight"]["dtype"] = json!("I32")
            })
        },
        &["model.norm.weight"],
    );
    t.model(
        "no numbers",
        |m| {
            bytes(weights(m), |b| {
                let start = 8 + u64::from_le_bytes(b[..8].try_into().unwrap()) as usize;
                b[start..]
                    .chunks_exact_mut(4)
                    .for_each(|w| w.copy_from_slice(&f32::NAN.to_le_bytes()));
            })
        },
        &["finite"],
    );
    t.model(
        "one weight is no number",
        |m| {
            bytes(weights(m), |b| {
                let end = b.len();
                b[end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
            })
        },
        &["finite"],
    );
    let trained = t.cases.len() - 2;
    t.cases[trained..]
        .iter_mut()
        .for_each(|case| case.before = None);
    t.model(
        "no tokenizer",
        |m| fs::remove_file(m.join("tokenizer.json")).unwrap(),
        &["tokenizer.json"],
    );
    t.model(
        "tokenizer cut",
        |m| bytes(m.join("tokenizer.json"), |b| b.truncate(200)),
        &["tokenizer.json"],
    );
    t.model(
        "tokenizer of nothing",
        |m| fs::write(m.join("tokenizer.json"), "{}").unwrap(),
        &["tokenizer.json"],
    );
    t.model(
        "tokenizer of another kind",
        |m| {
            edit(m.join("tokenizer.json"), |v| {
                v["model"]["type"] = json!("Magic")
            })
        },
        &["tokenizer.json"],
    );
    t.model(
        "tokenizer with more tokens",
        |m| {
            edit(m.join("tokenizer.json"), |v| {
                v["model"]["vocab"]["more"] = json!(70_000)
            })
        },
        &["tokenizer"],
    );
    t.model(
        "tokenizer_config cut",
        |m| bytes(m.join("tokenizer_config.json"), |b| b.truncate(10)),
        &["tokenizer_config.json"],
    );
    let template = |m: &Path| m.join("chat_template.jinja");
    t.model(
        "no template",
        |m| fs::remove_file(template(m)).unwrap(),
        &["template"],
    );
    t.model(
        "a template that does not end",
        |m| fs::write(template(m), "{% for m in messages %}").unwrap(),
        &["template"],
    );
    t.model(
        "a template of binary",
        |m| fs::write(template(m), b"\xff\xfe{{").unwrap(),
        &["template"],
    );
    t.model(
        "a template that raises",
        |m| fs::write(template(m), "{{ raise_exception('no turns') }}").unwrap(),
        &["row 1", "no turns"],
    );
    t.model("a template that runs on", |m| fs::write(template(m), "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}").unwrap(), &["row 1"]);
    t.model(
        "a template that hides turns",
        |m| fs::write(template(m), "{{ messages | length }}").unwrap(),
        &["row 1"],
    );
    t.model(
        "a template that says nothing",
        |m| fs::write(template(m), "").unwrap(),
        &["template"],
    );
    t.model(
        "an index without files",
        |m| {
            fs::remove_file(weights(m)).unwrap();
            fs::write(
                m.join("model.safetensors.index.json"),
                "{\"weight_map\": {\"model.norm.weight\": \"a.safetensors\"}}",
            )
            .unwrap();
        },
        &["a.safetensors"],
    );
    t.model(
        "an index that leaves the folder",
        |m| {
            fs::remove_file(weights(m)).unwrap();
            fs::write(
                m.join("model.safetensors.index.json"),
                "{\"weight_map\": {\"model.norm.weight\": \"../../model/model.safetensors\"}}",
            )
            .unwrap();
        },
        &["model.safetensors.index.json"],
    );
    for (name, bytes) in [
        ("cut", &b"{% if a"[..]),
        ("binary", b"\xff\xfe"),
        ("unknown", b"{% fly %}"),
    ] {
        t.add(
            &format!("template {name}"),
            |f| fs::write(f.join("t.jinja"), bytes).unwrap(),
            &[
                &[
                    "train",
                    "../model",
                    "../chats.jsonl",
                    "--out",
                    "run",
                    "template=t.jinja",
                ][..],
                &SMALL,
            ]
            .concat(),
            2,
            &["t.jinja"],
        );
    }
}

fn arguments(t: &mut Table) {
    t.arguments(&["train"], 2, &["model"]);
    t.arguments(&["train", "../model"], 2, &["data"]);
    t.arguments(&["train", "--fast"], 2, &["--fast"]);
    t.arguments(
        &["train", "../model", "../chats.jsonl", "--steps"],
        2,
        &["--steps"],
    );
    t.arguments(
        &["train", "../model", "../chats.jsonl", "--steps", "many"],
        2,
        &["--steps"],
    );
    t.arguments(
        &["train", "../model", "../chats.jsonl", "--steps", "-4"],
        2,
        &["-4"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--steps",
            "4",
            "--epochs",
            "2",
        ],
        2,
        &["--epochs"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "steps=4",
            "epochs=2",
        ],
        2,
        &["epochs"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--steps",
            "99999999999999999999",
        ],
        2,
        &["--steps"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--gpu-memory",
            "much",
        ],
        2,
        &["--gpu-memory", "size"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--devices",
            "gpu",
        ],
        2,
        &["devices"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--watch",
            "--port",
            "70000",
        ],
        2,
        &["70000"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--config",
            "nothere.toml",
        ],
        2,
        &["nothere.toml"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--config",
            ".",
        ],
        2,
        &["folder"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--config",
            "/dev/zero",
        ],
        2,
        &["/dev/zero"],
    );
    t.add(
        "a config that is a pipe",
        |f| pipe(&f.join("c")),
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "--config",
            "c",
        ],
        2,
        &["pipe"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "loss=mse",
        ],
        2,
        &["loss"],
    );
    t.arguments(
        &["train", "../model", "../chats.jsonl", "--out", "run", "=4"],
        2,
        &["=4"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "run",
            "lr=1e-4e",
        ],
        2,
        &["lr=1e-4e", "number"],
    );
    t.arguments(
        &["train", "../nothere", "../chats.jsonl", "--out", "run"],
        1,
        &["../nothere"],
    );
    t.arguments(
        &["train", "nobody/nothing", "../chats.jsonl", "--out", "run"],
        1,
        &["nobody/nothing"],
    );
    t.arguments(
        &["train", "../chats.jsonl", "../model", "--out", "run"],
        1,
        &["chats.jsonl"],
    );
    t.arguments(
        &[
            "train",
            "--init",
            "nothing",
            "../chats.jsonl",
            "--out",
            "run",
        ],
        2,
        &["init", "nothing"],
    );
    t.add(
        "init seq",
        |f| fs::write(f.join("t.txt"), "A text.").unwrap(),
        &[
            "train",
            "--init",
            "tiny",
            "t.txt",
            "--out",
            "run",
            "seq=1099511627776",
        ],
        2,
        &["seq"],
    );
    t.arguments(
        &[
            "train",
            "--init",
            "tiny",
            "../chats.jsonl",
            "--out",
            "run",
            "tokenizer=../nothere",
        ],
        1,
        &["../nothere"],
    );
    t.arguments(
        &[
            "train",
            "--init",
            "tiny",
            "../chats.jsonl",
            "--out",
            "run",
            "seed=1",
        ],
        1,
        &["chats.jsonl: row 1", "template"],
    );
    t.arguments(
        &["train", "../model", "../chats.jsonl", "--out", ""],
        2,
        &["out"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "../chats.jsonl",
        ],
        2,
        &["chats.jsonl", "out"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            "../chats.jsonl/run",
        ],
        2,
        &["chats.jsonl", "out"],
    );
    t.arguments(
        &["train", "../model", "../chats.jsonl", "--out", "/proc/run"],
        2,
        &["/proc/run", "out"],
    );
    t.arguments(
        &[
            "train",
            "../model",
            "../chats.jsonl",
            "--out",
            &"a".repeat(300),
        ],
        2,
        &["out"],
    );
    t.arguments(&["fly"], 2, &["fly"]);
    t.arguments(&["demo", "--out"], 2, &["--out"]);
    t.add(
        "an adapter",
        |f| {
            fs::create_dir(f.join("adapter")).unwrap();
            fs::write(f.join("adapter/adapter_config.json"), "{}").unwrap();
        },
        &["train", "adapter", "../chats.jsonl", "--out", "run"],
        2,
        &["adapter", "name the model"],
    );
    t.arguments(
        &["train", "../finished", "../chats.jsonl", "--out", "run"],
        2,
        &["finished", "finished/model"],
    );
    for (name, file) in [
        ("model", true),
        ("metrics.jsonl", false),
        ("report.html", false),
        ("events", true),
        ("checkpoints", true),
    ] {
        t.add(
            &format!("a folder with {name}"),
            |f| {
                fs::create_dir(f.join("work")).unwrap();
                if file {
                    fs::create_dir(f.join("work").join(name)).unwrap();
                    fs::write(f.join("work").join(name).join("mine"), "mine").unwrap();
                } else {
                    fs::write(f.join("work").join(name), "mine").unwrap();
                }
            },
            &[
                "train",
                "../model",
                "../chats.jsonl",
                "--out",
                "work",
                "steps=2",
            ],
            2,
            &["work", name, "--out"],
        );
    }
}

fn resumes(t: &mut Table) {
    t.resume(
        "other settings",
        |_| {},
        &["seed=4"],
        2,
        &["seed=4", "seed = 0", "--out"],
    );
    t.resume(
        "other data",
        |_| {},
        &["data=../nothing.jsonl"],
        2,
        &["data", "--out"],
    );
    t.resume(
        "another model",
        |_| {},
        &["model=../other"],
        2,
        &["model", "--out"],
    );
    t.resume(
        "another batch",
        |_| {},
        &["steps=3", "batch=3"],
        2,
        &["batch=3", "batch = 2"],
    );
    t.resume("lora", |_| {}, &["--lora"], 2, &["--lora", "method"]);
    t.resume(
        "fewer steps than warm-up",
        |r| {
            bytes(r.join("run.toml"), |b| {
                *b = text(b).replace("warmup = 0", "warmup = 9").into()
            })
        },
        &["steps=3"],
        2,
        &["warmup"],
    );
    t.resume("steps 0", |_| {}, &["steps=0"], 2, &["steps"]);
    t.resume(
        "settings cut",
        |r| bytes(r.join("run.toml"), |b| b.truncate(700)),
        &[],
        2,
        &["run.toml"],
    );
    t.resume(
        "settings empty",
        |r| fs::write(r.join("run.toml"), "").unwrap(),
        &[],
        2,
        &["run.toml"],
    );
    t.resume(
        "settings of others",
        |r| fs::write(r.join("run.toml"), "[package]\nname = \"x\"\n").unwrap(),
        &[],
        2,
        &["run.toml: line 1", "package"],
    );
    t.resume(
        "settings of binary",
        |r| fs::write(r.join("run.toml"), b"\0\xff").unwrap(),
        &[],
        2,
        &["run.toml"],
    );
    t.resume(
        "settings a folder",
        |r| {
            fs::remove_file(r.join("run.toml")).unwrap();
            fs::create_dir(r.join("run.toml")).unwrap();
        },
        &["model=../model", "data=../chats.jsonl"],
        2,
        &["run.toml"],
    );
    t.resume(
        "settings gone",
        |r| fs::remove_file(r.join("run.toml")).unwrap(),
        &["model=../model", "data=../chats.jsonl"],
        2,
        &["run", "--out"],
    );
    let longer = |run: &Path| {
        bytes(run.join("run.toml"), |b| {
            *b = text(b)
                .replace("\nsteps = 2 ", "\nsteps = 3 ")
                .replace("\"finished\"", "\"run\"")
                .into()
        })
    };
    t.resume(
        "metrics damaged",
        |r| {
            longer(r);
            bytes(r.join("metrics.jsonl"), |b| b[3] = b'!');
        },
        &[],
        1,
        &["metrics.jsonl", "line 1", "remove"],
    );
    t.resume(
        "metrics a folder",
        |r| {
            longer(r);
            fs::remove_file(r.join("metrics.jsonl")).unwrap();
            fs::create_dir(r.join("metrics.jsonl")).unwrap();
        },
        &[],
        1,
        &["metrics.jsonl"],
    );
    t.resume(
        "checkpoints a file",
        |r| {
            fs::remove_dir_all(r.join("checkpoints")).unwrap();
            fs::write(r.join("checkpoints"), "").unwrap();
        },
        &["steps=3"],
        1,
        &["checkpoints", "folder"],
    );
    t.resume(
        "data changed",
        |r| {
            let rows = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
            fs::write(r.join("../../now.jsonl"), rows).unwrap();
            bytes(r.join("run.toml"), |b| {
                *b = text(b).replace("chats.jsonl", "now.jsonl").into();
            });
            longer(r);
        },
        &[],
        2,
        &["data", "other files", "start anew"],
    );
    // Its settings are written before its place is looked for.
    t.cases.last_mut().unwrap().before = None;
    t.resume(
        "checkpoints gone",
        |r| fs::remove_dir_all(r.join("checkpoints")).unwrap(),
        &["steps=3"],
        2,
        &["run", "`model`", "--out"],
    );
    t.resume(
        "data gone",
        |r| {
            bytes(r.join("run.toml"), |b| {
                *b = text(b).replace("chats.jsonl", "gone.jsonl").into()
            })
        },
        &["steps=3"],
        1,
        &["gone.jsonl"],
    );
    t.resume(
        "model gone",
        |r| {
            bytes(r.join("run.toml"), |b| {
                *b = text(b).replace("/model\"", "/gone\"").into()
            })
        },
        &["steps=3"],
        1,
        &["gone"],
    );
    t.resume(
        "memory",
        |_| {},
        &["steps=3", "host_memory=100KiB"],
        3,
        &["host_memory"],
    );
    t.resume(
        "devices",
        |_| {},
        &["steps=3", "devices=abc"],
        2,
        &["devices"],
    );
}

#[test]
fn every_malformed_input_gets_one_line() {
    let mut table = Table::new("malformed");
    configs(&mut table);
    settings(&mut table);
    data(&mut table);
    models(&mut table);
    arguments(&mut table);
    resumes(&mut table);
    let count = table.cases.len();
    assert!(count >= 150, "{count} cases");
    let wrong = table.check();
    let list = wrong.join("\n");
    assert!(
        wrong.is_empty(),
        "{} of {count} cases:\n{list}",
        wrong.len()
    );
}

/// The page's port is somebody else's: said before a folder is left.
#[test]
fn a_port_in_use_is_said() {
    let run = Run::new("port");
    let (model, data) = (run.model(), run.chats(4));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let out = run.path("run");
    let arguments = [
        "train", &model, &data, "--out", &out, "--watch", "--port", &port,
    ];
    let output = kit::program(&arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let is_named = error.contains(&port) && error.contains("another port");
    assert!(error.starts_with("error: ") && is_named, "{error}");
    assert!(!Path::new(&out).exists());
}

/// Arguments that are no text.
#[cfg(unix)]
#[test]
fn arguments_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let bad = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    for before in [
        &["train"][..],
        &["train", "--config"],
        &["train", "m", "d", "--out"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roundpipe"));
        let output = command.args(before).arg(bad).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{before:?}: {error}");
        let count = error
            .lines()
            .filter(|line| line.starts_with("error: "))
            .count();
        assert_eq!(count, 1, "{before:?}: {error}");
    }
}

/// A checkpoint that was damaged is said and left out; when none is left, that is said too.
#[test]
fn damaged_checkpoints_are_said_and_left_out() {
    let table = Table::new("damaged");
    let run = &table.finished;
    let file = |step: u64| {
        run.join(format!(
            "checkpoints/step-{step:08}/state-00001.safetensors"
        ))
    };
    let damage = |step: u64| bytes(file(step), |b| *b.last_mut().unwrap() ^= 1);
    let go_on = |steps: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
            .args(["train", "--out", "finished", steps])
            .current_dir(table.run.path(""))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    damage(2);
    let out = go_on("steps=3");
    let is_said = out.contains("step 2 is skipped") && out.contains("going on behind step 1\n");
    assert!(is_said && out.contains("step-00000002"), "{out}");
    damage(2);
    damage(3);
    let out = go_on("steps=4");
    let is_said = out.contains("no checkpoint can be read, so the run begins again");
    assert!(is_said && out.contains("step 1/4"), "{out}");
}
