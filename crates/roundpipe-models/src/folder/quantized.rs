//! From a folder into quantised weights: whole tensors are quantised as they are read, one at a
//! time; those that bitsandbytes saved are taken as they are. Where it quantised a matrix that is
//! whole here (a head, a router), its codes are widened once they are read.
//!
//! bitsandbytes' tensors beside a weight `w`, whose bytes are codes: NF4 has `w.absmax`,
//! `w.quant_map`, with double quantisation `w.nested_absmax` and `w.nested_quant_map`, and
//! `w.quant_state.bitsandbytes__nf4`, bytes of JSON; 8 bits have `SCB`, 127 times our factors, and
//! `weight_format` in the module.
//!
//! Refused by name: other block sizes, rows in another order, parts that are missing or of another
//! size, scales that are not finite, code books that differ between the matrices of one weight.

use roundpipe::quant::{NF4_BLOCK, NF4_NESTED, Quantization, nf4_nested};
use roundpipe::{DType, Param};
use roundpipe_files::Weights;
use roundpipe_files::text::shown;
use roundpipe_files::weights::{Stored, param_dtype};
use safetensors::Dtype;
use serde_json::Value;

use super::Folder;
use super::load::{Job, OTHER_CONFIG, find, plan};
use crate::decoder::{Form, QuantizedWeight};
use crate::entry::{Entry, Piece};
use crate::error::{Error, Result};

/// Bytes of `quant_state` that are read.
const MOST_STATE: usize = 4096;
const AGAIN: &str = "download the model again";

/// A quantised weight and where its values stand in a folder.
pub(crate) struct QuantizedEntry {
    /// Name inside the model, for messages.
    pub(crate) name: String,
    pub(crate) weight: QuantizedWeight,
    /// In the order of their places; each has the same number of matrices.
    pub(crate) pieces: Vec<Piece>,
}

/// How the folder keeps a tensor: `None` whole, else quantised, and whether magnitudes are too.
pub(crate) fn stored_form(folder: &Folder, tensor: &str) -> Option<(Quantization, bool)> {
    if find(folder, &state_name(tensor)).is_some() {
        let double = find(folder, &format!("{tensor}.nested_absmax")).is_some();
        return Some((Quantization::Nf4, double));
    }
    let eight = find(folder, tensor).is_some_and(|(_, stored)| stored.dtype == Dtype::I8);
    eight.then_some((Quantization::Int8, false))
}

/// Whether any tensor of the folder is quantised by bitsandbytes, whatever its config says.
pub(crate) fn is_quantized(folder: &Folder) -> bool {
    let mut names = folder.tensors();
    names.any(|name| stored_form(folder, name).is_some())
}

/// Takes out of `entries` the matrices that are whole in the model and quantised in the folder: a
/// head, a router. Each becomes codes, and the parameter that they are to be widened into.
pub(crate) fn take_widened(
    folder: &Folder,
    entries: &mut Vec<Entry>,
) -> Result<Vec<(Param, QuantizedEntry)>> {
    let mut all = Vec::new();
    let mut rest = Vec::new();
    for entry in std::mem::take(entries) {
        let stored = match &entry.pieces[..] {
            [only] => stored_form(folder, &only.tensor),
            _ => None,
        };
        let (Some((how, double)), &[rows, columns]) = (stored, entry.param.shape().dims()) else {
            rest.push(entry);
            continue;
        };
        if !how.takes(rows, columns) {
            return Err(not_taken(folder, &entry.pieces[0], how));
        }
        let form = Form {
            how,
            double,
            matrices: 1,
        };
        let coded = QuantizedEntry {
            name: entry.name,
            weight: QuantizedWeight::zeros(form, *entry.param.shape(), entry.param.dtype())?,
            pieces: entry.pieces,
        };
        all.push((entry.param, coded));
    }
    *entries = rest;
    Ok(all)
}

/// A tensor whose codes are not read, for its sizes.
pub(crate) fn not_taken(folder: &Folder, piece: &Piece, how: Quantization) -> Error {
    let what = format!(
        "tensor {} is quantised as {how} and {:?}, but only multiples of {NF4_BLOCK} values in rows of even length are read so; quantise the model again in 8 bits, or with this matrix left whole (llm_int8_skip_modules)",
        shown(&piece.tensor),
        piece.dims
    );
    Error::file(folder.path(), what)
}

fn state_name(tensor: &str) -> String {
    format!("{tensor}.quant_state.bitsandbytes__nf4")
}

/// One piece, found and checked.
pub(super) struct QuantizedJob<'a> {
    entry: &'a QuantizedEntry,
    /// The matrices that the piece fills.
    first: usize,
    count: usize,
    source: Source<'a>,
}

enum Source<'a> {
    /// A whole tensor, read into memory of its own for the moment.
    Whole { piece: &'a Piece },
    /// NF4 of bitsandbytes.
    Nf4 {
        codes: Found<'a>,
        magnitudes: Found<'a>,
        nested: Option<(Found<'a>, f32)>,
        books: Vec<f32>,
        names: Vec<String>,
    },
    /// 8 bits of bitsandbytes.
    Int8 { codes: Found<'a>, rows: Found<'a> },
}

type Found<'a> = (&'a Weights, &'a Stored);

/// Finds the pieces of an entry in the folder and checks them.
pub(super) fn plan_quantized<'a>(
    folder: &'a Folder,
    entry: &'a QuantizedEntry,
) -> Result<Vec<QuantizedJob<'a>>> {
    let count = entry.weight.form.matrices / entry.pieces.len();
    let mut jobs = Vec::new();
    for (i, piece) in entry.pieces.iter().enumerate() {
        let source = match stored_form(folder, &piece.tensor) {
            None => {
                // Checks shape and type; nothing is read and no memory touched.
                plan(folder, &wide_entry(folder, entry, piece)?, &whole(piece))?;
                Source::Whole { piece }
            }
            Some((Quantization::Nf4, _)) => plan_nf4(folder, entry, piece)?,
            Some((Quantization::Int8, _)) => plan_int8(folder, entry, piece)?,
        };
        jobs.push(QuantizedJob {
            entry,
            first: i * count,
            count,
            source,
        });
    }
    let mut books = jobs.iter().filter_map(|job| match &job.source {
        Source::Nf4 { books, .. } => Some(books),
        _ => None,
    });
    if let Some(first) = books.next()
        && books.any(|other| other != first)
    {
        let what = format!(
            "the matrices of {} have different code books; quantise the model anew",
            entry.name
        );
        return Err(Error::file(folder.path(), what));
    }
    Ok(jobs)
}

/// The piece as the whole of a parameter.
fn whole(piece: &Piece) -> Piece {
    Piece {
        at: 0,
        ..piece.clone()
    }
}

/// A parameter of the piece alone, in the folder's own float type, without memory.
fn wide_entry(folder: &Folder, entry: &QuantizedEntry, piece: &Piece) -> Result<Entry> {
    let stored = find(folder, &piece.tensor).and_then(|(_, stored)| param_dtype(stored.dtype));
    // MXFP4 is exact in bf16.
    let dtype = stored.filter(|d| d.is_float()).unwrap_or(DType::BF16);
    Ok(Entry {
        name: entry.name.clone(),
        param: Param::absent(dtype, &[piece.numel()])?,
        pieces: vec![whole(piece)],
    })
}

fn part<'a>(folder: &'a Folder, name: &str, dtype: Dtype, count: usize) -> Result<Found<'a>> {
    let found = must_find(folder, name)?;
    let mut dims = found.1.dims.iter();
    let have = dims.try_fold(1usize, |n, d| n.checked_mul(*d));
    match found.1.dtype == dtype && have == Some(count) {
        true => Ok(found),
        false => Err(other_size(found, &format!("{count} of {dtype}"))),
    }
}

/// What bitsandbytes says of a weight in NF4: JSON in a tensor beside it.
struct State<'a> {
    shard: &'a Weights,
    name: String,
    json: Value,
}

impl<'a> State<'a> {
    fn read(folder: &'a Folder, tensor: &str) -> Result<Self> {
        let name = state_name(tensor);
        let (shard, stored) = must_find(folder, &name)?;
        let mut state = Self {
            shard,
            name,
            json: Value::Null,
        };
        if stored.dtype != Dtype::U8 || stored.range.len() > MOST_STATE {
            let what = format!("is not the state of a quantised weight; {AGAIN}");
            return Err(state.refused(what));
        }
        let bytes = shard.mapped(stored)?.read_all()?;
        state.json = serde_json::from_slice(bytes.bytes())
            .map_err(|e| state.refused(format!("is no JSON ({e}); {AGAIN}")))?;
        Ok(state)
    }

    fn refused(&self, what: impl std::fmt::Display) -> Error {
        let what = format!("tensor {} {what}", shown(&self.name));
        Error::file(self.shard.path(), what)
    }

    fn wants(&self, key: &str, want: Value, fix: &str) -> Result<()> {
        let have = &self.json[key];
        match *have == want {
            true => Ok(()),
            false => Err(self.refused(format!("has {key} = {have}, only {want} is read; {fix}"))),
        }
    }

    /// What is added to all magnitudes.
    fn offset(&self) -> Result<f32> {
        let offset = self.json["nested_offset"].as_f64();
        let offset = offset.map(|offset| offset as f32).filter(|x| x.is_finite());
        offset.ok_or_else(|| self.refused(format!("has no finite nested_offset; {AGAIN}")))
    }
}

/// Codes of NF4, under any element type: it names the storage alone (`bnb_4bit_quant_storage`).
/// FSDP wants all parameters of a module in one type, so QLoRA beside it stores bytes as BF16.
fn nf4_codes<'a>(folder: &'a Folder, name: &str, bytes: usize) -> Result<Found<'a>> {
    let found = must_find(folder, name)?;
    match found.1.range.len() == bytes {
        true => Ok(found),
        false => Err(other_size(found, &format!("{bytes} bytes of codes"))),
    }
}

fn must_find<'a>(folder: &'a Folder, name: &str) -> Result<Found<'a>> {
    find(folder, name).ok_or_else(|| {
        let what = format!("has no tensor {}; {AGAIN}", shown(name));
        Error::file(folder.path(), what)
    })
}

fn other_size((shard, stored): Found<'_>, needed: &str) -> Error {
    let what = format!(
        "tensor {} is {} {:?}, the model needs {needed}; {OTHER_CONFIG}",
        shown(&stored.name),
        stored.dtype,
        stored.dims
    );
    Error::file(shard.path(), what)
}

fn plan_nf4<'a>(
    folder: &'a Folder,
    entry: &QuantizedEntry,
    piece: &'a Piece,
) -> Result<Source<'a>> {
    let tensor = &piece.tensor;
    let name = |part: &str| format!("{tensor}.{part}");
    let (values, blocks) = (piece.numel(), piece.numel() / NF4_BLOCK);
    let double = entry.weight.form.double;
    let state = State::read(folder, tensor)?;
    state.wants("quant_type", "nf4".into(), AGAIN)?;
    let fix = format!("quantise the model again with blocksize {NF4_BLOCK}");
    state.wants("blocksize", NF4_BLOCK.into(), &fix)?;
    state.wants("shape", piece.dims.clone().into(), OTHER_CONFIG)?;
    let codes = nf4_codes(folder, tensor, values / 2)?;
    let kind = if double { Dtype::U8 } else { Dtype::F32 };
    let magnitudes = part(folder, &name("absmax"), kind, blocks)?;
    let mut names = vec![state.name.clone(), name("quant_map")];
    let mut books = floats(part(folder, &name("quant_map"), Dtype::F32, 16)?)?;
    let nested = match double {
        false => {
            books.resize(roundpipe::quant::NF4_BOOKS, 0.0);
            None
        }
        true => {
            let fix = format!("quantise the model again with nested blocksize {NF4_NESTED}");
            state.wants("nested_blocksize", NF4_NESTED.into(), &fix)?;
            let offset = state.offset()?;
            names.push(name("nested_quant_map"));
            books.extend(floats(part(folder, &names[2], Dtype::F32, 256)?)?);
            let factors = nf4_nested(blocks) - 1;
            let factors = part(folder, &name("nested_absmax"), Dtype::F32, factors)?;
            Some((factors, offset))
        }
    };
    Ok(Source::Nf4 {
        codes,
        magnitudes,
        nested,
        books,
        names,
    })
}

fn plan_int8<'a>(
    folder: &'a Folder,
    entry: &QuantizedEntry,
    piece: &'a Piece,
) -> Result<Source<'a>> {
    let module = piece.tensor.strip_suffix("weight").unwrap_or(&piece.tensor);
    let shape = entry.weight.shape();
    let rows = piece.numel() / shape[shape.rank() - 1];
    check_row_major(folder, &format!("{module}weight_format"))?;
    Ok(Source::Int8 {
        codes: part(folder, &piece.tensor, Dtype::I8, piece.numel())?,
        rows: part(folder, &format!("{module}SCB"), Dtype::F32, rows)?,
    })
}

/// Refuses codes that stand in another order than row by row. Old versions of bitsandbytes could save
/// them in the tiles of one generation of GPUs, and a current one refuses those, too. A folder that
/// does not say has rows.
fn check_row_major(folder: &Folder, name: &str) -> Result<()> {
    let Some((shard, stored)) = find(folder, name) else {
        return Ok(());
    };
    let says = if stored.dtype == Dtype::U8 && stored.range.len() == 1 {
        match shard.mapped(stored)?.read_all()?.bytes()[0] {
            0 => return Ok(()),
            1 => "1 (col32)".to_owned(),
            2 => "2 (col_turing)".to_owned(),
            3 => "3 (col_ampere)".to_owned(),
            other => other.to_string(),
        }
    } else {
        format!("{} {:?}", stored.dtype, stored.dims)
    };
    let what = format!(
        "tensor {} is {says}, only 0 (rows) is read; save the folder again with a current bitsandbytes, which stores rows",
        shown(name)
    );
    Err(Error::file(shard.path(), what))
}

/// Values of a small tensor of scales or of a code book.
fn floats(found: Found<'_>) -> Result<Vec<f32>> {
    check_finite(found)?;
    let bytes = found.0.mapped(found.1)?.read_all()?;
    Ok(words(bytes.bytes()).collect())
}

fn words(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let words = bytes.chunks_exact(4);
    words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

/// Refuses scales that are no numbers: all that they scale would be none, and a loss of NaN does not
/// say where it comes from.
fn check_finite((shard, stored): Found<'_>) -> Result<()> {
    let bytes = shard.mapped(stored)?.read_all()?;
    let Some(odd) = words(bytes.bytes()).find(|x| !x.is_finite()) else {
        return Ok(());
    };
    let what = format!(
        "tensor {} has a scale of {odd}, which is no finite number; {AGAIN}, or quantise it again",
        shown(&stored.name)
    );
    Err(Error::file(shard.path(), what))
}

impl QuantizedJob<'_> {
    /// Names of all tensors that it reads.
    pub(super) fn names(&self, folder: &Folder) -> Vec<String> {
        let of = |found: &Found<'_>| found.1.name.clone();
        match &self.source {
            Source::Whole { piece } => {
                let parts = ["", "_blocks", "_scales"];
                let names = parts.map(|part| format!("{}{part}", piece.tensor));
                let known = |name: &String| find(folder, name).is_some();
                names.into_iter().filter(known).collect()
            }
            Source::Nf4 {
                codes,
                magnitudes,
                nested,
                names,
                ..
            } => {
                let nested = nested.iter().map(|(found, _)| of(found));
                let own = [of(codes), of(magnitudes)].into_iter();
                own.chain(nested).chain(names.iter().cloned()).collect()
            }
            Source::Int8 { codes, rows } => {
                let module = codes.1.name.strip_suffix("weight").unwrap_or_default();
                vec![of(codes), of(rows), format!("{module}weight_format")]
            }
        }
    }

    /// Where reading begins, to go through files from front to back.
    pub(super) fn place(&self, folder: &Folder) -> Option<(std::path::PathBuf, usize)> {
        let name = self.names(folder).into_iter().next()?;
        let (shard, stored) = find(folder, &name)?;
        Some((shard.path().to_owned(), stored.range.start))
    }

    pub(super) fn run(&self, folder: &Folder) -> Result<()> {
        let weight = &self.entry.weight;
        match &self.source {
            Source::Whole { piece } => self.quantize(folder, piece),
            Source::Nf4 {
                codes,
                magnitudes,
                nested,
                books,
                ..
            } => {
                self.copy(&weight.codes, *codes)?;
                if magnitudes.1.dtype == Dtype::F32 {
                    check_finite(*magnitudes)?;
                }
                self.copy(&weight.scales, *magnitudes)?;
                if let (Some(home), Some((factors, offset))) = (&weight.nested, nested) {
                    let factors = floats(*factors)?;
                    let stride = 1 + factors.len();
                    let here = 4 * self.first * stride..4 * (self.first + 1) * stride;
                    let mut home = home.data().write(here)?;
                    let home = home.as_mut_slice::<f32>();
                    home[0] = *offset;
                    home[1..].copy_from_slice(&factors);
                }
                let home = weight.books.as_ref().expect("NF4 has books").data();
                let mut home = home.write(0..home.len())?;
                home.as_mut_slice::<f32>().copy_from_slice(books);
                Ok(())
            }
            Source::Int8 { codes, rows } => {
                self.copy(&weight.codes, *codes)?;
                let rows = floats(*rows)?;
                let bytes = 4 * rows.len();
                let at = self.first / self.count * bytes;
                let mut home = weight.scales.data().write(at..at + bytes)?;
                for (factor, most) in home.as_mut_slice::<f32>().iter_mut().zip(rows) {
                    *factor = most / 127.0;
                }
                Ok(())
            }
        }
    }

    /// Puts a tensor at the place of its piece.
    fn copy(&self, home: &Param, (shard, stored): Found<'_>) -> Result<()> {
        let from = shard.mapped(stored)?;
        let at = self.first / self.count * from.len();
        let mut home = home.data().write(at..at + from.len())?;
        super::convert::copy_bytes(from.read_all()?.bytes(), home.bytes());
        Ok(from.let_go(0..from.len())?)
    }

    /// Reads a whole tensor and quantises it.
    fn quantize(&self, folder: &Folder, piece: &Piece) -> Result<()> {
        let entry = wide_entry(folder, self.entry, piece)?;
        let job: Job = plan(folder, &entry, &entry.pieces[0])?;
        let wide = Param::zeros(entry.param.dtype(), &[piece.numel()])?;
        job.run(&mut wide.data().write(0..wide.bytes())?)?;
        let data = wide.data().read_all()?;
        let weight = &self.entry.weight;
        let each = weight.of_matrix();
        for i in 0..self.count {
            let (matrix, here) = (self.first + i, i * each..(i + 1) * each);
            super::convert::for_float!(wide.dtype(), |T| weight
                .fill_matrix(matrix, &data.as_slice::<T>()[here.clone()])?)
            .expect("checked: a float type");
        }
        Ok(())
    }
}
