//! The machine that a plan is for: this one, or one that is described.
//!
//! A described machine depends on nothing here: `--gpus 8xrtx4090` gives the same plan everywhere.
//! For this machine what `roundpipe doctor` measured is used where it is there and names the same
//! cards; else the table's figures for its cards; for a processor a product is timed. Where each
//! figure comes from is kept in words ([`Machine::sources`]).

use std::path::Path;
use std::sync::Arc;

use roundpipe::{
    AttentionRate, Bytes, CostModel, Cuda, DType, Device, DeviceKind, Devices, DiskSpace,
    KernelRates, MachineRates, Meta,
};

use crate::cards::{self, Architecture, Card};
use crate::error::{Error, Result};
use crate::machine;
use crate::profile::{GpuProfile, Profile};

/// Bytes per second of host memory, read and written, where nothing is known: what AdamW moved with
/// 16 threads on a Xeon with 8 channels (benches/results/2026-11-15-h200-models.md).
const HOST_RATE: f64 = 129e9;
/// A product that runs for minutes reaches this much of what one does in a third of a second, which
/// is what a profile has: 670 to 705 of 750 to 794 TFLOP/s on an H200 at its power limit.
const SUSTAINED: f64 = 0.90;
/// What both directions reach together, relative to one, where it was not measured.
const BOTH_WAYS: f64 = 1.7;
/// Bytes that AdamW moves for a bf16 parameter: gradient, master and moments read, master, moments
/// and weight written.
pub(super) const ADAMW_BYTES: f64 = 28.0;

/// What of a machine a user may state.
#[derive(Debug, Clone, Default)]
pub struct Described {
    /// Cards, such as `8xrtx4090`; this machine's without them.
    pub gpus: Option<String>,
    /// Bytes per second between host and one card, one way.
    pub pcie: Option<f64>,
    /// Bytes per second of host memory, read and written.
    pub host_bandwidth: Option<f64>,
}

/// A machine as plans see it. Rates are bytes per second.
#[derive(Debug, Clone)]
pub struct Machine {
    /// In words: `8 x rtx4090`.
    pub name: String,
    /// Cards, or one for the processor.
    pub workers: usize,
    /// Whether there is no card, so that the processor computes.
    pub is_host: bool,
    /// What each card has free.
    pub card_memory: Bytes,
    compute: Compute,
    /// To one card.
    pub upload: f64,
    /// From one card.
    pub download: f64,
    /// Both ways of one card together.
    pub both: f64,
    /// The host's memory, where it is known.
    pub host_memory: Option<Bytes>,
    /// Of the host's memory, read and written, shared by cards and optimizer.
    pub host_rate: f64,
    /// What the optimizer's pass moves.
    pub update_rate: f64,
    /// Flushed to the disk, where it was measured.
    pub disk_rate: Option<f64>,
    /// Free where the run will be, on this machine.
    pub disk_free: Option<Bytes>,
    /// Where the figures come from.
    pub sources: Vec<String>,
}

/// How fast kernels are.
#[derive(Debug, Clone, Copy)]
enum Compute {
    Card {
        architecture: Architecture,
        products: f64,
        copies: f64,
    },
    Processor {
        products: f64,
        copies: f64,
    },
}

impl Machine {
    /// The machine that is described, or this one. `devices` is the setting of that name,
    /// `host_memory` what the user gives it, `run` where the run's folder will be.
    ///
    /// # Errors
    /// [`Error::Usage`] for cards that are not known; when a device of this machine cannot be
    /// opened.
    pub fn find(
        described: &Described,
        devices: Option<&str>,
        host_memory: Option<Bytes>,
        run: &Path,
    ) -> Result<Self> {
        let mut machine = match &described.gpus {
            Some(gpus) => {
                let (count, card) = cards::parse(gpus)?;
                Self::of_cards(count, card, host_memory)
            }
            None => Self::here(devices, host_memory, run)?,
        };
        if let Some(pcie) = described.pcie {
            machine.set_link(pcie, pcie, BOTH_WAYS * pcie);
            machine.sources.push(format!(
                "PCIe: {} each way, as given",
                gb_per_s(machine.upload)
            ));
        }
        if let Some(rate) = described.host_bandwidth {
            (machine.host_rate, machine.update_rate) = (rate, rate);
            machine
                .sources
                .push(format!("host memory: {}, as given", gb_per_s(rate)));
        }
        Ok(machine)
    }

    /// So many cards of a kind, in a host of which little is known.
    pub fn of_cards(count: usize, card: &Card, host_memory: Option<Bytes>) -> Self {
        let link = card.link.one_way();
        let mut machine = Self {
            name: format!("{count} x {}", card.name),
            workers: count,
            is_host: false,
            card_memory: card.memory,
            compute: Compute::Card {
                architecture: card.architecture,
                products: card.product_rate(),
                copies: card.copy_rate(),
            },
            upload: link,
            download: link,
            both: BOTH_WAYS * link,
            host_memory,
            host_rate: HOST_RATE,
            update_rate: HOST_RATE,
            disk_rate: None,
            disk_free: None,
            sources: Vec::new(),
        };
        machine.sources = vec![
            table_source(card),
            format!(
                "host memory: {}, assumed (--host-bandwidth says otherwise)",
                gb_per_s(HOST_RATE)
            ),
        ];
        machine
    }

    fn here(devices: Option<&str>, host_memory: Option<Bytes>, run: &Path) -> Result<Self> {
        let opened = match devices {
            Some(list) => Devices::parse(list).map_err(|e| {
                Error::Usage(format!("devices {list}: {e}; --gpus describes others"))
            })?,
            None => Devices::all()?,
        };
        let profile = match Profile::path() {
            Some(path) => Profile::load(&path)?,
            None => None,
        };
        let gpus: Vec<&Arc<dyn Device>> = opened
            .workers
            .iter()
            .filter(|device| device.id().kind.is_gpu())
            .collect();
        let available = roundpipe::host_memory::available();
        let memory = host_memory.into_iter().chain(available).min();
        let mut machine = match gpus.first() {
            Some(first) => {
                let name = Cuda::new(first.id().index)?.name();
                let free = gpus.iter().map(|gpu| gpu.memory()).min();
                let free = free.unwrap_or(Bytes(0));
                Self::with_cards(&name, gpus.len(), free, profile.as_ref())?
            }
            None => Self::processor(&opened, profile.as_ref())?,
        };
        machine.host_memory = memory;
        machine.disk_free = free_space(run);
        if let Some(profile) = &profile {
            machine.host_rate = profile.host.memory_rate;
            machine.update_rate = ADAMW_BYTES * profile.host.adamw_params;
            machine.disk_rate = Some(profile.host.disk_write_rate);
        } else {
            machine.sources.push(
                "host memory and optimizer: assumed; `roundpipe doctor` measures them".to_owned(),
            );
        }
        Ok(machine)
    }

    fn with_cards(
        name: &str,
        count: usize,
        free: Bytes,
        profile: Option<&Profile>,
    ) -> Result<Self> {
        let known = Card::find(name);
        let measured = profile.and_then(|profile| {
            let mut gpus = profile.gpus.iter();
            gpus.find(|gpu| gpu.name == name)
        });
        let architecture = known.map_or(Architecture::Ada, |card| card.architecture);
        let Some(gpu) = measured else {
            let Some(card) = known else {
                return Err(Error::Failed(format!(
                    "{name} is not in the table of cards; run `roundpipe doctor`, which measures it, or \
                     describe another with --gpus"
                )));
            };
            let mut machine = Self::of_cards(count, card, None);
            machine.card_memory = free;
            machine.sources = vec![table_source(card)];
            if profile.is_some() {
                machine
                    .sources
                    .push("the profile is of other cards; run `roundpipe doctor` again".into());
            }
            return Ok(machine);
        };
        Ok(Self::of_profile(gpu, architecture, count, free))
    }

    /// Cards as they were measured.
    pub(super) fn of_profile(
        gpu: &GpuProfile,
        architecture: Architecture,
        count: usize,
        free: Bytes,
    ) -> Self {
        Self {
            name: format!("{count} x {}", gpu.name),
            workers: count,
            is_host: false,
            card_memory: free,
            compute: Compute::Card {
                architecture,
                products: SUSTAINED * gpu.bf16_flops,
                copies: gpu.memory_rate,
            },
            upload: gpu.upload_rate,
            download: gpu.download_rate,
            both: gpu.both_rate,
            host_memory: None,
            host_rate: HOST_RATE,
            update_rate: HOST_RATE,
            disk_rate: None,
            disk_free: None,
            sources: vec![format!("{}: measured by `roundpipe doctor`", gpu.name)],
        }
    }

    fn processor(opened: &Devices, profile: Option<&Profile>) -> Result<Self> {
        let (products, copies, source) = match profile {
            Some(profile) => (
                profile.host.f32_flops,
                profile.host.memory_rate,
                "processor: measured by `roundpipe doctor`",
            ),
            None => (
                machine::product_rate(opened.workers[0].clone(), DType::F32)?,
                HOST_RATE,
                "processor: a product, timed now",
            ),
        };
        let memory = roundpipe::host_memory::available();
        Ok(Self {
            name: "the processor".to_owned(),
            workers: opened.workers.len(),
            is_host: true,
            card_memory: memory.unwrap_or(Bytes::gib(64)),
            compute: Compute::Processor { products, copies },
            upload: copies,
            download: copies,
            both: copies,
            host_memory: memory,
            host_rate: copies,
            update_rate: copies,
            disk_rate: None,
            disk_free: None,
            sources: vec![source.to_owned()],
        })
    }

    /// Replaces the rates between host and cards.
    pub fn set_link(&mut self, upload: f64, download: f64, both: f64) {
        (self.upload, self.download, self.both) = (upload, download, both);
    }

    /// Operations per second of a large product on one worker.
    pub fn product_rate(&self) -> f64 {
        match self.compute {
            Compute::Card { products, .. } | Compute::Processor { products, .. } => products,
        }
    }

    /// Refuses fp8 on cards that have none.
    ///
    /// # Errors
    /// [`Error::Usage`] that names them.
    pub(super) fn check_fp8(&self) -> Result<()> {
        match self.compute {
            Compute::Card {
                architecture: Architecture::Ampere,
                ..
            } => Err(Error::Usage(format!(
                "fp8: {} has none; leave fp8 out, or use cards from Ada on, such as rtx4090 or h100",
                self.name
            ))),
            _ => Ok(()),
        }
    }

    /// Workers that only count, as many as there are cards. Where `context` is given, packed
    /// documents have so many tokens.
    pub(super) fn devices(&self, context: Option<u64>) -> Vec<Arc<dyn Device>> {
        self.stand_ins(self.cost_model().with_rates(self.kernel_rates(context)))
    }

    /// The same before anything was measured: what an engine plans its first steps with.
    pub(super) fn unmeasured(&self) -> Vec<Arc<dyn Device>> {
        self.stand_ins(self.cost_model())
    }

    fn stand_ins(&self, model: CostModel) -> Vec<Arc<dyn Device>> {
        let card = |index: usize| -> Arc<dyn Device> {
            Meta::numbered(model, index as u32, self.card_memory)
        };
        (0..self.workers).map(card).collect()
    }

    fn cost_model(&self) -> CostModel {
        match self.compute {
            Compute::Processor { .. } => DeviceKind::Cpu.into(),
            Compute::Card {
                architecture: Architecture::Hopper,
                ..
            } => Cuda::costs_of((9, 0)),
            Compute::Card { .. } => DeviceKind::Cuda.into(),
        }
    }

    fn kernel_rates(&self, context: Option<u64>) -> KernelRates {
        match self.compute {
            Compute::Card {
                architecture,
                products,
                copies,
            } => cards::kernel_rates(architecture, products, copies, context),
            Compute::Processor { products, copies } => {
                // Rough: attention's scores are small products, and its exponentials take as long.
                let attention = AttentionRate {
                    most: 0.4 * products,
                    half_at: 64.0,
                    narrow: 1.0,
                };
                KernelRates {
                    products: 0.8 * products,
                    // Widened to bf16 first.
                    fp8_products: Some(0.6 * products),
                    grouped_products: 0.6 * products,
                    attention,
                    attention_grad: attention,
                    attention_grad_any_order: attention,
                    own_attention: attention,
                    own_attention_grad: attention,
                    bytes: copies,
                    launch_s: 2e-5,
                    library_attention: true,
                    packed_context: context,
                }
            }
        }
    }

    /// What a planner may assume, with an update that moves so many bytes per parameter and of a table
    /// in front updates so many rows first.
    pub(super) fn rates(&self, update_bytes: f64, first_rows: Option<usize>) -> MachineRates {
        MachineRates {
            first_rows,
            upload_bytes_per_s: self.upload,
            download_bytes_per_s: self.download,
            updated_params_per_s: self.update_rate / update_bytes.max(1.0),
        }
    }
}

fn table_source(card: &Card) -> String {
    format!(
        "{}: {}, {:.0} TFLOP/s of bf16 stated and {:.0} expected, {} of memory bandwidth ({}); {}, {} each way",
        card.name,
        card.memory,
        card.flops / 1e12,
        card.product_rate() / 1e12,
        gb_per_s(card.memory_rate),
        card.source,
        card.link.name(),
        gb_per_s(card.link.one_way()),
    )
}

/// A rate in words.
pub(super) fn gb_per_s(rate: f64) -> String {
    format!("{:.0} GB/s", rate / 1e9)
}

/// Free space where a folder is or will be.
fn free_space(path: &Path) -> Option<Bytes> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find(|folder| folder.exists())?;
    DiskSpace::at(there).map(|space| space.free)
}
