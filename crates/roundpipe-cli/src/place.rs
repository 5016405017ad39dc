//! Where a command runs: devices, their memory, and the host's.

use std::io::Write;

use anyhow::Context;
use clap::ValueEnum;
use roundpipe::{Bytes, Cuda, Devices, Pin, RingOptions};

/// Options that every command with an engine has.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Place {
    /// Devices: cuda, cuda:0,cuda:1, cpu or cpu:2 [default: every GPU, or the processor]
    #[arg(long)]
    pub devices: Option<String>,
    /// The most to take of each GPU, its context included, for example 24GiB [default: what is free,
    /// less a sixteenth]
    #[arg(long, value_parser = size)]
    pub gpu_memory: Option<Bytes>,
    /// Pinned host memory, which GPUs copy faster
    #[arg(long, value_enum, default_value_t = PinArg::Try)]
    pub pin: PinArg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PinArg {
    /// As much as the driver gives; the rest is pageable
    #[default]
    Try,
    /// All of it from the driver, or an error
    Alloc,
    /// All of it registered with the driver, or an error
    Register,
    /// None; weights that are not trained stay in the model's files, which may be larger than memory
    Off,
}

impl From<PinArg> for Pin {
    fn from(pin: PinArg) -> Self {
        match pin {
            PinArg::Try => Self::Try,
            PinArg::Alloc => Self::Alloc,
            PinArg::Register => Self::Register,
            PinArg::Off => Self::Off,
        }
    }
}

/// A size with its unit.
pub fn size(text: &str) -> Result<Bytes, String> {
    text.parse()
}

impl Place {
    /// Opens the devices; says which were left out, and what makes them slower than they could be.
    pub fn open(&self, out: &mut impl Write) -> anyhow::Result<Devices> {
        let devices = match &self.devices {
            Some(list) => Devices::parse(list),
            None => Devices::all(),
        };
        let devices = devices.context("--devices")?;
        let has_gpu = devices
            .workers
            .iter()
            .any(|device| device.id().kind.is_gpu());
        let slower = if has_gpu {
            Cuda::attention_note()
        } else {
            None
        };
        devices
            .skipped
            .iter()
            .chain(&slower)
            .try_for_each(|line| writeln!(out, "{line}"))?;
        Ok(devices)
    }

    /// How memory is reserved on them.
    pub fn ring(&self) -> RingOptions {
        RingOptions {
            memory: self.gpu_memory,
            pin: self.pin.into(),
            ..RingOptions::default()
        }
    }
}
