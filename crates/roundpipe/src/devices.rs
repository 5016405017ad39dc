//! Which devices to run on, from a line of text.
//!
//! `cuda` is every GPU, `cuda:1` one of them, `cpu` the processor, `cpu:4` four workers on it.
//! Items are listed with commas; a GPU listed twice gets two workers. Nothing at all means every
//! GPU, or the processor where there is none.
//!
//! Every GPU is every one that can be used: one that is too old is left out, and why is kept in
//! [`Devices::skipped`]. One that is named, or where none is left, is an error.

use std::sync::Arc;

use roundpipe_tensor::{Cpu, Cuda, Device};

use crate::error::{Error, Result};

/// The devices of a machine.
pub struct Devices {
    /// In the order they were listed.
    pub workers: Vec<Arc<dyn Device>>,
    /// Why there is no GPU among them, when none was asked for by name.
    pub note: Option<String>,
    /// A line for each GPU that was left out because it cannot be used.
    pub skipped: Vec<String>,
}

impl Devices {
    /// Every GPU that can be used, or the processor where there is no GPU at all.
    ///
    /// # Errors
    /// When a GPU is there but cannot be opened, or none of those there can be used.
    pub fn all() -> Result<Self> {
        let why = match Cuda::count() {
            Ok(0) => "the driver knows no GPU".to_owned(),
            Ok(_) => return Self::parse("cuda"),
            Err(error) => error.to_string(),
        };
        Ok(Self {
            workers: vec![Cpu::new(None)?],
            note: Some(why),
            skipped: Vec::new(),
        })
    }

    /// Why there is no GPU and which were left out, a line each; none where all is well. A
    /// [ring](crate::Ring::of) of these devices keeps them.
    pub fn notes(&self) -> Vec<String> {
        let none = self.note.iter().map(|why| format!("no GPU: {why}"));
        none.chain(self.skipped.iter().cloned()).collect()
    }

    /// The devices of a list.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no device; when one cannot be opened.
    pub fn parse(list: &str) -> Result<Self> {
        let (mut wanted, mut skipped): (Vec<Item>, Vec<String>) = Default::default();
        for item in list.split(',').map(str::trim) {
            wanted.extend(Item::parse(item, &mut skipped)?);
        }
        let mut workers: Vec<Option<Arc<dyn Device>>> = wanted.iter().map(|_| None).collect();
        for at in 0..wanted.len() {
            if workers[at].is_some() {
                continue;
            }
            // All places of one device are opened together, so that its workers share it.
            let places: Vec<usize> = (at..wanted.len())
                .filter(|i| wanted[*i] == wanted[at])
                .collect();
            for (place, worker) in places.iter().zip(wanted[at].open(places.len())?) {
                workers[*place] = Some(worker);
            }
        }
        Ok(Self {
            workers: workers.into_iter().flatten().collect(),
            note: None,
            skipped,
        })
    }
}

/// The GPUs of `count` that can be used; a line for each other.
fn usable(
    count: usize,
    refuses: impl Fn(u32) -> Result<Option<String>>,
    skipped: &mut Vec<String>,
) -> Result<Vec<u32>> {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for index in 0..count as u32 {
        match refuses(index)? {
            Some(why) => bad.push(format!("cuda:{index} is left out: {why}")),
            None => good.push(index),
        }
    }
    if good.is_empty() {
        let what = format!("no GPU can be used, {}; use cpu", bad.join(", "));
        return Err(Error::config("devices", what));
    }
    skipped.extend(bad);
    Ok(good)
}

/// One worker to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    Cpu,
    Cuda(u32),
}

impl Item {
    fn parse(text: &str, skipped: &mut Vec<String>) -> Result<Vec<Self>> {
        let wrong = || {
            let what = format!(
                "`{text}` is none; use cuda, cuda:N, cpu or cpu:WORKERS, with commas between"
            );
            Error::config("devices", what)
        };
        let (kind, number) = match text.split_once(':') {
            Some((kind, number)) => (kind, Some(number.parse::<u32>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        match (kind, number) {
            ("cpu", Some(0)) => Err(wrong()),
            ("cpu", count) if count.unwrap_or(1) <= 64 => {
                Ok(vec![Self::Cpu; count.unwrap_or(1) as usize])
            }
            ("cuda", Some(index)) => Ok(vec![Self::Cuda(index)]),
            ("cuda", None) => match Cuda::count()? {
                0 => Err(Error::config("devices", "there is no GPU; use cpu")),
                count => {
                    let good = usable(count, |index| Ok(Cuda::refuses(index)?), skipped)?;
                    Ok(good.into_iter().map(Self::Cuda).collect())
                }
            },
            _ => Err(wrong()),
        }
    }

    fn open(self, count: usize) -> Result<Vec<Arc<dyn Device>>> {
        Ok(match self {
            Self::Cpu => Cpu::workers(count, None)?
                .into_iter()
                .map(|w| w as Arc<dyn Device>)
                .collect(),
            Self::Cuda(index) => Cuda::workers(index, count)?
                .into_iter()
                .map(|w| w as Arc<dyn Device>)
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Devices, usable};
    use crate::error::Error;

    #[test]
    fn lists_give_workers_in_order_and_bad_ones_a_line() {
        let devices = Devices::parse("cpu:2, cpu").unwrap();
        assert_eq!(devices.workers.len(), 3);
        for bad in [
            "", "gpu", "cpu:0", "cpu:x", "cpu:9999", "cuda:-1", "cpu,,cpu",
        ] {
            let text = Devices::parse(bad).err().expect(bad).to_string();
            assert!(
                text.starts_with("devices: ") && !text.contains('\n'),
                "{bad}: {text}"
            );
        }
    }

    /// Without a GPU the program runs on the processor and can say why.
    #[test]
    fn everything_is_at_least_the_processor() {
        let devices = Devices::all().unwrap();
        assert!(!devices.workers.is_empty());
        let gpu = devices.workers[0].id().kind == roundpipe_tensor::DeviceKind::Cuda;
        assert_eq!(gpu, devices.note.is_none());
    }

    /// An old card beside a new one is left out with a line; alone it is an error, and so is a
    /// driver that fails.
    #[test]
    fn cards_that_are_refused_are_left_out_while_others_are_left() {
        let old = |index: u32| Ok((index != 1).then(|| format!("card {index} is too old")));
        let mut skipped = Vec::new();
        assert_eq!(usable(3, old, &mut skipped).unwrap(), [1]);
        assert_eq!(
            skipped,
            [
                "cuda:0 is left out: card 0 is too old",
                "cuda:2 is left out: card 2 is too old"
            ]
        );
        let text = usable(1, old, &mut skipped).unwrap_err().to_string();
        assert!(
            text.contains("no GPU can be used, cuda:0") && text.contains("use cpu"),
            "{text}"
        );
        assert!(usable(2, |_| Err(Error::config("devices", "broken")), &mut skipped).is_err());
        assert_eq!(skipped.len(), 2, "errors leave no lines");
        let mut none = Vec::new();
        assert_eq!(usable(2, |_| Ok(None), &mut none).unwrap(), [0, 1]);
        assert!(none.is_empty());
    }
}
