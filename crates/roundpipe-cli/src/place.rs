//! Where a command runs: devices and their memory.

use anyhow::Context;
use roundpipe::{Bytes, Cuda, DeviceKind, Devices, RingOptions};

/// Options that every command with an engine has.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Place {
    /// Devices: cuda, cuda:0,cuda:1, cpu or cpu:2 [default: every GPU, or the processor]
    #[arg(long)]
    pub devices: Option<String>,
    /// Memory to use of each GPU, for example 24GiB [default: half of it]
    #[arg(long, value_parser = size)]
    pub gpu_memory: Option<Bytes>,
}

/// What makes the opened devices slower than they could be, in one line.
pub fn slower(devices: &Devices) -> Option<String> {
    let has_gpu = devices.workers.iter().any(|device| device.id().kind == DeviceKind::Cuda);
    if has_gpu { Cuda::attention_note() } else { None }
}

fn size(text: &str) -> Result<Bytes, String> {
    text.parse()
}

impl Place {
    /// Opens the devices.
    pub fn open(&self) -> anyhow::Result<Devices> {
        let devices = match &self.devices {
            Some(list) => Devices::parse(list),
            None => Devices::all(),
        };
        devices.context("--devices")
    }

    /// How memory is reserved on them.
    pub fn ring(&self) -> RingOptions {
        RingOptions { memory: self.gpu_memory, ..RingOptions::default() }
    }
}
