//! Which devices to run on, from a line of text.
//!
//! `cuda` is every GPU, `cuda:1` one of them, `cpu` the processor, `cpu:4` four workers on it. Items are listed
//! with commas; a GPU listed twice gets two workers. Nothing at all means every GPU, or the processor where
//! there is none.

use std::sync::Arc;

use roundpipe_tensor::{Cpu, Cuda, Device};

use crate::error::{Error, Result};

/// The devices of a machine.
pub struct Devices {
    /// In the order they were listed.
    pub workers: Vec<Arc<dyn Device>>,
    /// Why there is no GPU among them, when none was asked for by name.
    pub note: Option<String>,
}

impl Devices {
    /// Every GPU, or the processor where there is none.
    ///
    /// # Errors
    /// When a GPU is there but cannot be opened.
    pub fn all() -> Result<Self> {
        let why = match Cuda::count() {
            Ok(0) => "the driver knows no GPU".to_owned(),
            Ok(_) => return Self::parse("cuda"),
            Err(error) => error.to_string(),
        };
        Ok(Self { workers: vec![Cpu::new(None)?], note: Some(why) })
    }

    /// The devices of a list.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no device; when one cannot be opened.
    pub fn parse(list: &str) -> Result<Self> {
        let mut wanted: Vec<Item> = Vec::new();
        for item in list.split(',').map(str::trim) {
            wanted.extend(Item::parse(item)?);
        }
        let mut workers: Vec<Option<Arc<dyn Device>>> = wanted.iter().map(|_| None).collect();
        for at in 0..wanted.len() {
            if workers[at].is_some() {
                continue;
            }
            // All places of one device are opened together, so that its workers share it.
            let places: Vec<usize> = (at..wanted.len()).filter(|i| wanted[*i] == wanted[at]).collect();
            for (place, worker) in places.iter().zip(wanted[at].open(places.len())?) {
                workers[*place] = Some(worker);
            }
        }
        Ok(Self { workers: workers.into_iter().flatten().collect(), note: None })
    }
}

/// One worker to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    Cpu,
    Cuda(u32),
}

impl Item {
    fn parse(text: &str) -> Result<Vec<Self>> {
        let wrong = || {
            let what = format!("`{text}` is none; use cuda, cuda:N, cpu or cpu:WORKERS, with commas between");
            Error::config("devices", what)
        };
        let (kind, number) = match text.split_once(':') {
            Some((kind, number)) => (kind, Some(number.parse::<u32>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        match (kind, number) {
            ("cpu", Some(0)) => Err(wrong()),
            ("cpu", count) if count.unwrap_or(1) <= 64 => Ok(vec![Self::Cpu; count.unwrap_or(1) as usize]),
            ("cuda", Some(index)) => Ok(vec![Self::Cuda(index)]),
            ("cuda", None) => match Cuda::count()? {
                0 => Err(Error::config("devices", "there is no GPU; use cpu")),
                count => Ok((0..count as u32).map(Self::Cuda).collect()),
            },
            _ => Err(wrong()),
        }
    }

    fn open(self, count: usize) -> Result<Vec<Arc<dyn Device>>> {
        Ok(match self {
            Self::Cpu => Cpu::workers(count, None)?.into_iter().map(|w| w as Arc<dyn Device>).collect(),
            Self::Cuda(index) => {
                Cuda::workers(index, count)?.into_iter().map(|w| w as Arc<dyn Device>).collect()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Devices;

    #[test]
    fn lists_give_workers_in_order_and_bad_ones_a_line() {
        let devices = Devices::parse("cpu:2, cpu").unwrap();
        assert_eq!(devices.workers.len(), 3);
        for bad in ["", "gpu", "cpu:0", "cpu:x", "cpu:9999", "cuda:-1", "cpu,,cpu"] {
            let text = Devices::parse(bad).err().expect(bad).to_string();
            assert!(text.starts_with("devices: ") && !text.contains('\n'), "{bad}: {text}");
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
}
