//! From a folder into parameters.
//!
//! Everything is checked first: that every tensor is there in the right shape and a usable type,
//! that the folder holds nothing the model has no place for, and that the parameters may be
//! written. Then the files are read from front to back in windows; the pages of a window are given
//! back when it has been read, so the memory in use is the model and one window.
//!
//! With [`LoadOptions::mapped`] nothing is read: a parameter that stands in a file as it does in
//! the model shows the file's own pages, and every other (experts in pieces, transposed, another
//! type, quantised) is put together whenever it is read, by the same functions.

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;

use roundpipe::{DType, HostBuf, HostMut, TensorResult};
use roundpipe_files::Weights;
use roundpipe_files::text::shown;
use roundpipe_files::weights::{Stored, param_dtype};

use super::Folder;
use super::convert::{Float, copy_bytes, for_float, read_mxfp4, read_plain, read_transposed};
use super::quantized::{QuantizedEntry, QuantizedJob, plan_quantized};
use crate::entry::{Entry, Piece, PieceLayout};
use crate::error::{Error, Result};
use crate::mxfp4;

/// Bytes of a file that are read before their pages are given back.
const WINDOW: usize = 32 << 20;
pub(super) const OTHER_CONFIG: &str = "check that config.json belongs to these weights";

/// What a user may choose about loading.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Tensors that a folder may hold without the model having a place for them: whole names, or
    /// what a name ends with after a dot.
    pub ignored: Vec<String>,
    /// Whether parameters stay in the folder's files and take no memory for good. The files must
    /// not change while the parameters live.
    pub mapped: bool,
}

impl Default for LoadOptions {
    /// Buffers that older versions of transformers saved and newer ones compute; into memory.
    fn default() -> Self {
        let known = ["rotary_emb.inv_freq", "attn.masked_bias", "attn.bias"];
        Self {
            ignored: known.map(String::from).to_vec(),
            mapped: false,
        }
    }
}

impl LoadOptions {
    /// Leaves parameters in the folder's files.
    #[must_use]
    pub fn mapped(mut self) -> Self {
        self.mapped = true;
        self
    }

    /// Also allows `name`, such as the `lm_head.weight` of a tied model.
    #[must_use]
    pub fn ignoring(mut self, name: impl Into<String>) -> Self {
        self.ignored.push(name.into());
        self
    }

    fn ignores(&self, tensor: &str) -> bool {
        self.ignored
            .iter()
            .any(|known| match tensor.strip_suffix(known.as_str()) {
                Some(rest) => rest.is_empty() || rest.ends_with('.'),
                None => false,
            })
    }
}

/// What was loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensors read (a quantised one counts once).
    pub tensors: usize,
    /// Bytes read.
    pub bytes: u64,
    /// Tensors whose type was changed on the way.
    pub converted: usize,
    /// Tensors that were de-quantised.
    pub dequantised: usize,
    /// Tensors of the folder that were left alone.
    pub ignored: Vec<String>,
}

/// Fills the parameters of `entries` from a folder.
///
/// # Errors
/// [`Error::File`] naming the tensor that is missing, has another shape or type, or has no place in
/// the model; [`Error::Argument`] for entries that contradict themselves; [`Error::Tensor`] while
/// a parameter is in use. Nothing has been written then.
pub fn load(folder: &Folder, entries: &[Entry], options: &LoadOptions) -> Result<LoadReport> {
    load_all(folder, entries, &[], options)
}

/// [`load`] with quantised weights beside. They are always in memory, which then holds one more
/// tensor while it is quantised.
pub(crate) fn load_all(
    folder: &Folder,
    entries: &[Entry],
    quantized: &[QuantizedEntry],
    options: &LoadOptions,
) -> Result<LoadReport> {
    check_entries(entries)?;
    let mut coded = Vec::new();
    for entry in quantized {
        coded.extend(plan_quantized(folder, entry)?);
    }
    let mut jobs = Vec::new();
    for entry in entries {
        let pieces = entry.pieces.iter();
        jobs.push(
            pieces
                .map(|piece| plan(folder, entry, piece))
                .collect::<Result<Vec<_>>>()?,
        );
    }
    let mut report = LoadReport {
        ignored: check_extra(folder, jobs.iter().flatten(), &coded, options)?,
        ..Default::default()
    };
    report.tensors += coded.len();
    coded.sort_by_cached_key(|job| job.place(folder));
    jobs.iter().flatten().for_each(|job| report.count(job));
    if options.mapped {
        // Made before the first parameter moves: an error leaves all of them as they were.
        let homes = entries.iter().zip(jobs).map(|(e, jobs)| mapped(e, jobs));
        let homes: Vec<HostBuf> = homes.collect::<Result<_>>()?;
        for (entry, home) in entries.iter().zip(homes) {
            entry.param.rehome(home)?;
        }
        coded.iter().try_for_each(|job| job.run(folder))?;
        return Ok(report);
    }
    let mut jobs: Vec<(Job, HostMut)> = entries
        .iter()
        .zip(jobs)
        .flat_map(|(entry, jobs)| jobs.into_iter().map(move |job| (entry, job)))
        // Taken before the first byte is written: a parameter in use refuses the whole load.
        .map(|(entry, job)| {
            let home = entry.param.data().write(job.place.clone())?;
            Ok((job, home))
        })
        .collect::<Result<_>>()?;
    jobs.sort_by(|(a, _), (b, _)| (&a.path, a.first_byte).cmp(&(&b.path, b.first_byte)));
    folder.shards().iter().for_each(Weights::expect_stream);
    for (job, home) in &mut jobs {
        job.run(home)?;
    }
    drop(jobs);
    coded.iter().try_for_each(|job| job.run(folder))?;
    Ok(report)
}

/// The home of a parameter whose values stay in files.
fn mapped(entry: &Entry, jobs: Vec<Job>) -> Result<HostBuf> {
    let bytes = entry.param.bytes();
    if let [job] = &jobs[..]
        && job.is_copy()
        && job.first.bytes.is_aligned_to(job.dtype.size())
    {
        return Ok(job.first.bytes.clone());
    }
    let make = move |buf: &HostBuf| {
        for job in &jobs {
            job.first.bytes.expect_soon();
        }
        for job in &jobs {
            job.run(&mut buf.write(job.place.clone())?)?;
        }
        Ok(())
    };
    Ok(HostBuf::made_on_read(&entry.name, bytes, make))
}

impl LoadReport {
    fn count(&mut self, job: &Job) {
        self.tensors += 1;
        let scales = job.scales.as_ref().map_or(0, |s| s.bytes.len());
        self.bytes += (job.first.bytes.len() + scales) as u64;
        self.dequantised += usize::from(job.scales.is_some());
        self.converted += usize::from(job.first.dtype != job.dtype);
    }
}

/// Whether each parameter occurs once and its pieces cover it exactly: a mistake here is the
/// model's, not the folder's.
pub(super) fn check_entries(entries: &[Entry]) -> Result<()> {
    let mut seen = HashSet::new();
    for entry in entries {
        let fail = |why: &str| {
            Err(Error::argument(
                format!("entry {}", shown(&entry.name)),
                why,
            ))
        };
        if !seen.insert(entry.param.id()) {
            return fail("its parameter occurs in another entry; give a tied weight one entry");
        }
        let mut spans: Vec<Range<usize>> = Vec::new();
        for piece in &entry.pieces {
            let count = piece.dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            let Some(end) = count.and_then(|n| n.checked_add(piece.at)) else {
                return fail("a piece is larger than any memory; check its dims");
            };
            if piece.layout != PieceLayout::Plain
                && (piece.dims.len() < 2 || !entry.param.dtype().is_float())
            {
                return fail(
                    "only floats of two or more dimensions can be transposed; use PieceLayout::Plain",
                );
            }
            spans.push(piece.at..end);
        }
        spans.sort_by_key(|s| (s.start, s.end));
        let covered = spans
            .iter()
            .try_fold(0, |at, s| (s.start == at).then_some(s.end));
        if covered != Some(entry.param.shape().numel()) {
            return fail(
                "its pieces do not cover the parameter exactly once; check their places and dims",
            );
        }
    }
    Ok(())
}

/// One piece: where its bytes are in the files, and where they go.
pub(super) struct Job {
    path: PathBuf,
    /// In the file, for reading from front to back.
    first_byte: usize,
    /// The tensor, or its blocks.
    first: Part,
    /// The scales of a quantised tensor, perhaps in another file.
    scales: Option<Part>,
    layout: PieceLayout,
    /// The piece's shape in the folder.
    dims: Vec<usize>,
    /// The parameter's type.
    dtype: DType,
    /// The piece's bytes in the parameter.
    place: Range<usize>,
}

/// A tensor's bytes in a mapped file.
struct Part {
    name: String,
    bytes: HostBuf,
    dtype: DType,
}

impl Part {
    fn new(shard: &Weights, stored: &Stored) -> Result<Self> {
        Ok(Self {
            name: stored.name.clone(),
            bytes: shard.mapped(stored)?,
            dtype: param_dtype(stored.dtype).expect("checked: a type of parameters"),
        })
    }

    /// Shows `read` part of the tensor, then gives its pages back.
    fn window<R>(&self, at: Range<usize>, read: impl FnOnce(&[u8]) -> R) -> TensorResult<R> {
        let shown = self.bytes.read(at.clone())?;
        let result = read(shown.bytes());
        self.bytes.let_go(at)?;
        Ok(result)
    }
}

fn job(
    entry: &Entry,
    piece: &Piece,
    (shard, first): (&Weights, &Stored),
    scales: Option<(&Weights, &Stored)>,
) -> Result<Job> {
    let size = entry.param.dtype().size();
    let start = piece.at * size;
    Ok(Job {
        path: shard.path().to_owned(),
        first_byte: first.range.start,
        first: Part::new(shard, first)?,
        scales: scales.map(|(s, t)| Part::new(s, t)).transpose()?,
        layout: piece.layout,
        dims: piece.dims.clone(),
        dtype: entry.param.dtype(),
        place: start..start + piece.numel() * size,
    })
}

pub(super) fn find<'a>(folder: &'a Folder, name: &str) -> Option<(&'a Weights, &'a Stored)> {
    let shard = folder.shard_of(name)?;
    Some((shard, shard.stored(name)?))
}

/// Finds a piece in the folder and checks its shape and type.
pub(super) fn plan(folder: &Folder, entry: &Entry, piece: &Piece) -> Result<Job> {
    if piece.layout == PieceLayout::Mxfp4OrTransposed
        && let Some(job) = plan_mxfp4(folder, entry, piece)?
    {
        return Ok(job);
    }
    let Some((shard, first)) = find(folder, &piece.tensor) else {
        let what = format!(
            "has no tensor {} ({}); {OTHER_CONFIG}",
            shown(&piece.tensor),
            entry.name
        );
        return Err(Error::file(folder.path(), what));
    };
    check_dims(shard, first, &piece.dims)?;
    let (have, want) = (param_dtype(first.dtype), entry.param.dtype());
    if have != Some(want) && !(have.is_some_and(DType::is_float) && want.is_float()) {
        let what = format!(
            "tensor {} has type {}, which cannot become {want}; save the model as BF16, F16 or F32",
            shown(&first.name),
            first.dtype
        );
        return Err(Error::file(shard.path(), what));
    }
    job(entry, piece, (shard, first), None)
}

/// The quantised form of a piece, where the folder has one.
fn plan_mxfp4(folder: &Folder, entry: &Entry, piece: &Piece) -> Result<Option<Job>> {
    let names = ["blocks", "scales"].map(|part| format!("{}_{part}", piece.tensor));
    let [blocks, scales] = names.each_ref().map(|name| find(folder, name));
    let (blocks, scales) = match (blocks, scales) {
        (None, None) => return Ok(None),
        (Some(blocks), Some(scales)) => (blocks, scales),
        (blocks, _) => {
            let (have, lacks) = if blocks.is_some() { (0, 1) } else { (1, 0) };
            let what = format!(
                "has {} but not {}; download the model again",
                shown(&names[have]),
                shown(&names[lacks])
            );
            return Err(Error::file(folder.path(), what));
        }
    };
    let [outer @ .., inner, rows] = &piece.dims[..] else {
        unreachable!("checked: two or more dimensions")
    };
    let grouped: Vec<usize> = [outer, &[*rows, inner / mxfp4::GROUP]].concat();
    if inner % mxfp4::GROUP != 0 {
        let what = format!(
            "{} is quantised, but rows of {inner} values are no groups of 32; {OTHER_CONFIG}",
            shown(&names[0])
        );
        return Err(Error::file(blocks.0.path(), what));
    }
    check_dims(
        blocks.0,
        blocks.1,
        &[&grouped[..], &[mxfp4::GROUP_BYTES]].concat(),
    )?;
    check_dims(scales.0, scales.1, &grouped)?;
    for (shard, part) in [blocks, scales] {
        if param_dtype(part.dtype) != Some(DType::U8) {
            let name = shown(&part.name);
            let what = format!(
                "tensor {name} has type {}, MXFP4 needs U8; download the model again",
                part.dtype
            );
            return Err(Error::file(shard.path(), what));
        }
    }
    Ok(Some(job(entry, piece, blocks, Some(scales))?))
}

fn check_dims(shard: &Weights, stored: &Stored, want: &[usize]) -> Result<()> {
    if stored.dims == want {
        return Ok(());
    }
    let name = shown(&stored.name);
    let what = format!(
        "tensor {name} has shape {:?}, the model needs {want:?}; {OTHER_CONFIG}",
        stored.dims
    );
    Err(Error::file(shard.path(), what))
}

/// Refuses tensors that the model has no place for; gives the names of those that do no harm.
fn check_extra<'a>(
    folder: &Folder,
    jobs: impl Iterator<Item = &'a Job>,
    coded: &[QuantizedJob<'_>],
    options: &LoadOptions,
) -> Result<Vec<String>> {
    let coded: HashSet<String> = coded.iter().flat_map(|job| job.names(folder)).collect();
    let used: HashSet<&str> = jobs
        .flat_map(|job| [Some(&job.first), job.scales.as_ref()])
        .flatten()
        .map(|part| part.name.as_str())
        .collect();
    let (ignored, extra): (Vec<&str>, Vec<&str>) = folder
        .tensors()
        .filter(|name| !used.contains(name) && !coded.contains(*name))
        .partition(|name| options.ignores(name));
    if let Some(first) = extra.first() {
        let more = if extra.len() > 1 {
            format!(" and {} more", extra.len() - 1)
        } else {
            String::new()
        };
        let what = format!(
            "holds tensor {}{more}, which the model has no place for; {OTHER_CONFIG}",
            shown(first)
        );
        let path = folder.shard_of(first).map_or(folder.path(), Weights::path);
        return Err(Error::file(path, what));
    }
    Ok(ignored.into_iter().map(String::from).collect())
}

impl Job {
    /// Whether the piece stands in the file as it does in the parameter.
    fn is_copy(&self) -> bool {
        self.first.dtype == self.dtype && self.layout == PieceLayout::Plain
    }

    /// Reads the piece into its home.
    pub(super) fn run(&self, home: &mut HostMut) -> TensorResult<()> {
        if self.is_copy() {
            return self.copy(home.bytes());
        }
        for_float!(self.dtype, |D| self.fill::<D>(home.as_mut_slice::<D>()))
            .expect("checked: only floats change type or layout")
    }

    fn fill<D: Float>(&self, dst: &mut [D]) -> TensorResult<()> {
        if let Some(scales) = &self.scales {
            return self.fill_mxfp4(scales, dst);
        }
        for_float!(self.first.dtype, |S| match self.layout {
            PieceLayout::Plain => self.fill_plain::<S, D>(dst),
            _ => self.fill_transposed::<S, D>(dst),
        })
        .expect("checked: a float type")
    }

    fn fill_plain<S: Float, D: Float>(&self, dst: &mut [D]) -> TensorResult<()> {
        let each = WINDOW / size_of::<S>();
        for (i, dst) in dst.chunks_mut(each).enumerate() {
            let at = i * WINDOW..i * WINDOW + dst.len() * size_of::<S>();
            self.first.window(at, |src| read_plain::<S, D>(src, dst))?;
        }
        Ok(())
    }

    fn fill_transposed<S: Float, D: Float>(&self, dst: &mut [D]) -> TensorResult<()> {
        let [.., rows, cols] = self.dims[..] else {
            unreachable!("checked: two or more dimensions")
        };
        if rows * cols == 0 {
            return Ok(());
        }
        let line = cols * size_of::<S>();
        let each = (WINDOW / line).max(1);
        for (m, dst) in dst.chunks_exact_mut(rows * cols).enumerate() {
            for first in (0..rows).step_by(each) {
                let last = rows.min(first + each);
                let at = (m * rows + first) * line..(m * rows + last) * line;
                self.first
                    .window(at, |src| read_transposed::<S, D>(src, first, cols, dst))?;
            }
        }
        Ok(())
    }

    fn fill_mxfp4<D: Float>(&self, scales: &Part, dst: &mut [D]) -> TensorResult<()> {
        let each = WINDOW / mxfp4::GROUP_BYTES;
        for (i, dst) in dst.chunks_mut(each * mxfp4::GROUP).enumerate() {
            let groups = i * each..i * each + dst.len() / mxfp4::GROUP;
            let at = groups.start * mxfp4::GROUP_BYTES..groups.end * mxfp4::GROUP_BYTES;
            self.first.window(at, |blocks| {
                scales.window(groups, |scales| read_mxfp4(blocks, scales, dst))
            })??;
        }
        Ok(())
    }

    /// A piece that stands in the file as it does here.
    fn copy(&self, dst: &mut [u8]) -> TensorResult<()> {
        for (i, dst) in dst.chunks_mut(WINDOW).enumerate() {
            let at = i * WINDOW..i * WINDOW + dst.len();
            self.first.window(at, |src| copy_bytes(src, dst))?;
        }
        Ok(())
    }
}
