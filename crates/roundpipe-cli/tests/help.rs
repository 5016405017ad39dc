//! Help, completions and manual pages of the built program.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn roundpipe(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roundpipe"))
        .args(args)
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn help(args: &[&str]) -> String {
    let output = roundpipe(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    text(&output.stdout)
}

/// The commands that a help lists; `help` itself aside.
fn listed(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// All commands, those below others included, as words of a command line.
fn commands() -> Vec<Vec<String>> {
    let mut found: Vec<Vec<String>> = Vec::new();
    let mut open = vec![Vec::new()];
    while let Some(command) = open.pop() {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        for name in listed(&help(&[&words[..], &["--help"]].concat())) {
            open.push([command.clone(), vec![name]].concat());
        }
        if !command.is_empty() {
            found.push(command);
        }
    }
    found.sort();
    found
}

/// Help is one screen: lines that fit, few of them, and an example that begins with the command.
#[test]
fn every_command_has_a_help_of_one_screen_with_an_example() {
    let first = help(&["--help"]);
    let lines = first.lines().count();
    assert!((20..=40).contains(&lines), "{lines} lines:\n{first}");
    let all = commands();
    assert!(all.len() >= 8, "{all:?}");
    for command in all {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        let name = words.join(" ");
        let short = help(&[&words[..], &["-h"]].concat());
        let lines = short.lines().count();
        assert!(lines <= 60, "{name} -h has {lines} lines");
        for line in short.lines() {
            let width = line.chars().count();
            assert!(width <= 100, "{name} -h is {width} columns wide: {line}");
        }
        if listed(&short).is_empty() {
            let is_example = |line: &&str| line.contains(&format!("roundpipe {name}"));
            let (_, examples) = short.split_once("Example").unwrap_or_default();
            assert!(
                examples.lines().any(|line| is_example(&line)),
                "{name} has no example"
            );
        }
        let long = help(&[&words[..], &["--help"]].concat());
        assert!(long.contains("Usage:") && !long.contains("TODO"), "{name}");
    }
}

/// The README's table has a line for every command, and no other.
#[test]
fn the_readme_lists_all_commands() {
    let readme = include_str!("../../../README.md");
    let table = readme
        .lines()
        .skip_while(|line| *line != "| command | what |");
    let rows = table.skip(2).take_while(|line| line.starts_with('|'));
    let mut named: Vec<&str> = rows
        .filter_map(|row| row.strip_prefix("| `")?.split(['`', ' ']).next())
        .collect();
    let first = listed(&help(&["--help"]));
    let mut offered: Vec<&str> = first.iter().map(String::as_str).collect();
    named.sort_unstable();
    named.dedup();
    offered.sort_unstable();
    assert_eq!(named, offered);
}

/// Nothing that is not a terminal gets colours, whatever the variables say, and NO_COLOR is obeyed.
#[test]
fn pipes_get_no_colours() {
    let commands: [&[&str]; 3] = [
        &["--help"],
        &["train", "--no-such-option"],
        &["export", "/no/such/model", "--to", "hf", "--out", "x"],
    ];
    let variables = [
        ("NO_COLOR", "1"),
        ("TERM", "xterm-256color"),
        ("COLORTERM", "truecolor"),
    ];
    for args in commands {
        for (name, value) in variables {
            let output = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
                .args(args)
                .env(name, value)
                .output()
                .unwrap();
            let all = [output.stdout, output.stderr].concat();
            assert!(!all.is_empty() && !all.contains(&0x1b), "{args:?} {name}");
        }
    }
}

/// On a terminal, NO_COLOR turns colours off (`script` makes the terminal, where it is installed).
#[test]
fn no_color_is_obeyed_on_a_terminal() {
    let program = env!("CARGO_BIN_EXE_roundpipe");
    let command = format!("'{program}' train --no-such-option");
    let output = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("NO_COLOR", "1")
        .env("TERM", "xterm-256color")
        .stdin(Stdio::null())
        .output();
    let Ok(output) = output else {
        return;
    };
    let shown = text(&output.stdout);
    assert!(shown.contains("no-such-option"), "{shown}");
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
}

/// Every shell gets a script; bash, where there is one, completes commands and options with it.
#[test]
fn shells_complete_commands() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = help(&["completions", shell]);
        for command in listed(&help(&["--help"])) {
            assert!(script.contains(&command), "{shell}: {command}");
        }
    }
    let unknown = roundpipe(&["completions", "csh"]);
    assert_eq!(unknown.status.code(), Some(2));

    let script = help(&["completions", "bash"]);
    let ask = |words: &str, last: usize| {
        // What bash does when a user types the words and presses tab.
        let asked = format!(
            "COMP_WORDS=({words}); COMP_CWORD={last}; _roundpipe roundpipe \"${{COMP_WORDS[{last}]}}\" \
             \"${{COMP_WORDS[{}]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            last - 1
        );
        let mut bash = Command::new("bash")
            .args(["--norc", "--noprofile", "-s"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let mut input = bash.stdin.take()?;
        write!(input, "{script}\n{asked}\n").ok()?;
        drop(input);
        Some(text(&bash.wait_with_output().ok()?.stdout))
    };
    let Some(reply) = ask("roundpipe exp", 1) else {
        return;
    };
    assert_eq!(reply.trim(), "export");
    let reply = ask("roundpipe export --sh", 2).unwrap();
    assert_eq!(reply.trim(), "--shard-size");
    let reply = ask("roundpipe export --to ''", 3).unwrap();
    assert_eq!(
        reply.split_whitespace().collect::<Vec<_>>(),
        ["hf", "gguf", "adapter"]
    );
}

/// A page for the program and each command: the parts that a manual page has, with the examples;
/// read by man or groff, where they are installed.
#[test]
fn manual_pages_are_written() {
    let folder = std::env::temp_dir().join(format!("roundpipe-man-{}", std::process::id()));
    let main = help(&["man"]);
    assert!(main.contains(".TH") && main.contains(".SH NAME"), "{main}");
    let out = folder.join("man1").display().to_string();
    let said = help(&["man", "--out", &out]);
    let mut names: Vec<String> = commands()
        .iter()
        .map(|words| format!("roundpipe-{}.1", words.join("-")))
        .chain(["roundpipe.1".into()])
        .collect();
    names.sort();
    assert!(
        said.starts_with(&format!("wrote {} pages", names.len())),
        "{said}"
    );
    let entries = std::fs::read_dir(&out).unwrap();
    let mut found: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    found.sort();
    assert_eq!(found, names);
    for name in &names {
        let path = format!("{out}/{name}");
        let page = std::fs::read_to_string(&path).unwrap();
        for part in [".TH", ".SH NAME", ".SH SYNOPSIS"] {
            assert!(page.contains(part), "{name} has no {part}");
        }
        assert!(page.is_ascii(), "{name} depends on the locale");
        let rendered = Command::new("groff")
            .args(["-man", "-Tutf8", "-ww", &path])
            .output();
        if let Ok(rendered) = rendered {
            assert!(
                rendered.status.success() && rendered.stderr.is_empty(),
                "{name}: {rendered:?}"
            );
            assert!(text(&rendered.stdout).contains("roundpipe"), "{name}");
        }
    }
    let export = std::fs::read_to_string(format!("{out}/roundpipe-export.1")).unwrap();
    assert!(
        export.contains(".SH EXAMPLES\n.nf\n  roundpipe export runs/mine"),
        "{export}"
    );
    let file = folder.join("file");
    std::fs::write(&file, "").unwrap();
    let refused = roundpipe(&["man", "--out", &file.join("x").display().to_string()]);
    assert_eq!(
        (refused.status.code(), text(&refused.stderr).lines().count()),
        (Some(1), 1)
    );
    std::fs::remove_dir_all(folder).unwrap();
}

/// A reader that has seen enough is no failure.
#[test]
fn a_closed_pipe_is_no_failure() {
    for args in [&["man"][..], &["completions", "zsh"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_roundpipe"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{args:?}: {output:?}"
        );
    }
}
