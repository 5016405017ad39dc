//! `roundpipe` without a command: a small transformer learns stories, on any machine, in a minute
//! or two, through the very path that fine-tunes large models.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use roundpipe_train::{Given, Request};

use crate::Failure;
use crate::train;

/// Stories written for this project.
const STORIES: &str = include_str!("../assets/harbor.txt");
/// More workers would only wait for each other.
const MOST_WORKERS: usize = 64;
/// The most folders of earlier demos that are looked at.
const MOST_FOLDERS: usize = 10_000;

/// Train a small transformer on stories that ship with the program
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct DemoCmd {
    /// Text or rows to learn from [default: the stories]
    #[arg(long)]
    text: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = DemoCmd::default().steps)]
    steps: u64,
    /// Workers that the stages of the model go round; they share the processor
    #[arg(long, default_value_t = DemoCmd::default().workers)]
    workers: usize,
    /// How the samples before and after training begin
    #[arg(long, default_value_t = DemoCmd::default().prompt)]
    prompt: String,
    /// The run's folder [default: runs/demo, or the next that is not finished]
    #[arg(long)]
    out: Option<PathBuf>,
}

impl Default for DemoCmd {
    fn default() -> Self {
        Self {
            text: None,
            steps: 800,
            workers: 2,
            prompt: "The cat ".into(),
            out: None,
        }
    }
}

const EXAMPLES: &str = "Example:
  roundpipe demo --steps 800 --workers 2";

impl DemoCmd {
    pub fn run(self, out: &mut dyn Write, stop: &Arc<AtomicBool>) -> Result<(), Failure> {
        if !(1..=MOST_WORKERS).contains(&self.workers) {
            let what = format!("--workers must be from 1 to {MOST_WORKERS}");
            return Err(Failure::usage(what));
        }
        let folder = match &self.out {
            Some(folder) => folder.clone(),
            None => next_folder()?,
        };
        let data = match &self.text {
            Some(text) => text.clone(),
            None => write_stories(&folder)?,
        };
        let given = self.settings(&folder, &data)?;
        let request = Request { given, watch: None };
        train::train(&request, out, stop)
    }

    fn settings(&self, folder: &Path, data: &Path) -> Result<Given, Failure> {
        let mut given = Given::default();
        let mut put = |key: &str, value: toml::Value| given.put(key, value, format!("demo {key}"));
        put("init", "tiny".into())?;
        put("data", data.display().to_string().into())?;
        put("out", folder.display().to_string().into())?;
        put(
            "steps",
            i64::try_from(self.steps).unwrap_or(i64::MAX).into(),
        )?;
        put("devices", format!("cpu:{}", self.workers).into())?;
        put("prompts", self.prompt.as_str().into())?;
        // Workers that share a processor gain nothing by stages, so the planner would make one. This
        // shows what GPUs get.
        put("stages", 3.into())?;
        // Fixed, so that the number of workers changes no bit.
        put("microbatches", 4.into())?;
        put("batch", 16.into())?;
        put("seq", 128.into())?;
        put("lr", 3e-3.into())?;
        put("seed", 1.into())?;
        put("lag", 1.into())?;
        put("sample_tokens", 120.into())?;
        put("sample_temperature", 0.7.into())?;
        put("sample_every", i64::MAX.into())?;
        Ok(given)
    }
}

/// `runs/demo`, or the first behind it that is not finished.
fn next_folder() -> Result<PathBuf, Failure> {
    let folders = (1..MOST_FOLDERS).map(|number| match number {
        1 => PathBuf::from("runs/demo"),
        _ => PathBuf::from(format!("runs/demo-{number}")),
    });
    let mut free = folders.filter(|folder| !folder.join("model").exists());
    free.next()
        .ok_or_else(|| Failure::usage("runs/ is full of demos; remove some".into()))
}

/// The stories as rows beside the run, so that a run that goes on finds them.
fn write_stories(folder: &Path) -> Result<PathBuf, Failure> {
    let path = folder.join("stories.jsonl");
    if path.is_file() {
        return Ok(path);
    }
    std::fs::create_dir_all(folder)?;
    std::fs::write(&path, rows(STORIES))?;
    Ok(path)
}

/// A row for each story; a line of capitals begins one.
fn rows(text: &str) -> String {
    let is_title =
        |line: &str| line.chars().any(char::is_alphabetic) && !line.chars().any(char::is_lowercase);
    let mut stories: Vec<String> = Vec::new();
    for line in text.lines() {
        match stories.last_mut() {
            Some(story) if !is_title(line) => {
                story.push('\n');
                story.push_str(line);
            }
            _ => stories.push(line.to_owned()),
        }
    }
    let row = |story: &String| format!("{}\n", serde_json::json!({ "text": story.trim() }));
    stories.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_story_is_a_row() {
        let rows = super::rows(super::STORIES);
        let titles = super::STORIES.matches("\n\nTHE ").count();
        assert!(titles > 3 && rows.lines().count() > titles, "{titles}");
        let words = |text: &str| text.split_whitespace().count();
        let texts: Vec<String> = rows
            .lines()
            .map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap())
            .map(|row| row["text"].as_str().unwrap().to_owned())
            .collect();
        let sum: usize = texts.iter().map(|text| words(text)).sum();
        assert_eq!(sum, words(super::STORIES));
    }
}
