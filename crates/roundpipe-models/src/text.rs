//! Text as bytes: the story that ships with the program, windows of text to train on, and text from
//! a model of bytes.

use roundpipe::{Cx, Error, Result, RngSite, Worker};

use crate::decoder::Model;
use crate::sample::Sampler;

/// A story written for this project, small enough to learn in a minute.
pub const DEMO_TEXT: &str = include_str!("../assets/harbor.txt");

/// Random windows of a text: inputs and the bytes that follow them.
#[derive(Debug, Clone)]
pub struct Windows {
    bytes: Vec<u8>,
    seq: usize,
    seed: u64,
}

impl Windows {
    /// Windows of `seq` bytes of `text`.
    ///
    /// # Errors
    /// [`Error::Config`] when the text is shorter than one window and the byte after it.
    pub fn new(text: &str, seq: usize, seed: u64) -> Result<Self> {
        let bytes = text.as_bytes().to_vec();
        if seq == 0 || bytes.len() < seq + 1 {
            let what = format!(
                "{} bytes are too few for windows of {seq}; give a longer text",
                bytes.len()
            );
            return Err(Error::config("text", what));
        }
        Ok(Self { bytes, seq, seed })
    }

    /// The batch of a step: `count` windows as ids and labels, both [count, seq]. The same step
    /// always gives the same batch.
    pub fn batch(&self, step: u64, count: usize) -> (Vec<i64>, Vec<i64>) {
        let key = RngSite {
            seed: self.seed,
            step,
            ..RngSite::default()
        }
        .key();
        let starts = (self.bytes.len() - self.seq) as u64;
        let (mut ids, mut labels) = (Vec::new(), Vec::new());
        for i in 0..count as u64 {
            let start = ((u64::from(key.word(i)) * starts) >> 32) as usize;
            let window = &self.bytes[start..=start + self.seq];
            ids.extend(window[..self.seq].iter().map(|b| i64::from(*b)));
            labels.extend(window[1..].iter().map(|b| i64::from(*b)));
        }
        (ids, labels)
    }
}

/// `prompt` continued by `count` bytes. The model sees at most its longest sequence of what came
/// before.
///
/// # Errors
/// What the model reports.
pub fn continue_text(
    model: &Model,
    worker: &Worker,
    prompt: &str,
    count: usize,
    sampler: Sampler,
) -> Result<String> {
    let mut bytes = prompt.as_bytes().to_vec();
    if bytes.is_empty() {
        bytes.push(b'\n');
    }
    for at in 0..count as u64 {
        let seen = &bytes[bytes.len().saturating_sub(model.config.max_positions)..];
        let ids: Vec<i64> = seen.iter().map(|b| i64::from(*b)).collect();
        let mut cx = Cx::infer(worker);
        let ids = cx.tensor(&ids, &[1, seen.len()])?;
        let logits = model.logits(&mut cx, &ids)?;
        let last: Vec<f32> = cx.narrow(&logits, 1, seen.len() - 1, 1)?.to_vec()?;
        bytes.push(sampler.choose(&last, at).min(255) as u8);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::Windows;

    #[test]
    fn labels_are_the_next_bytes_and_every_start_can_occur() {
        let windows = Windows::new("abcdef", 3, 1).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for step in 0..50 {
            let (ids, labels) = windows.batch(step, 2);
            assert_eq!((ids.len(), labels.len()), (6, 6));
            assert!(ids.iter().zip(&labels).all(|(id, label)| id + 1 == *label));
            seen.extend([ids[0], ids[3]]);
        }
        assert_eq!(seen, [97, 98, 99].into());
        assert_eq!(windows.batch(7, 2), windows.batch(7, 2));
        assert!(Windows::new("abc", 3, 1).is_err());
    }
}
