//! The weight of a linear map: whole, or as codes and scales.
//!
//! A quantised weight is a few frozen parameters, so that an engine keeps, sends and counts their
//! bytes as it does for any other. It is quantised matrix by matrix, each from values that are there
//! for that moment only, and widened by the operations that use it.
//!
//! Refused elsewhere: training one, and saving one ([`Model::save`](super::Model::save)).
//!
//! # Invariants
//! - Codes depend on values alone, never on the number of threads.

use rayon::prelude::*;
use roundpipe::ops::Quantized;
use roundpipe::quant::{
    NF4_BLOCK, NF4_BOOKS, NF4_NESTED, Quantization, int8_row, int8_value, nf4_blocks, nf4_books,
    nf4_magnitude, nf4_magnitudes, nf4_nested,
};
use roundpipe::{
    Cx, DType, Element, HostBuf, Param, ParamVisitor, RngKey, Shape, Tensor, TensorError,
    TensorResult, bf16, f16,
};

/// Values per task: enough to be worth a task, few enough to share among threads.
const SHARE: usize = 1 << 16;

/// A weight [out, in], or [experts, out, in].
#[derive(Debug, Clone)]
pub(crate) enum Weight {
    Whole(Param),
    Quantized(QuantizedWeight),
}

/// How a weight is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) how: Quantization,
    /// Whether NF4's magnitudes are quantised themselves.
    pub(crate) double: bool,
    /// Matrices, one behind the other, that are quantised each by itself.
    pub(crate) matrices: usize,
}

/// A weight as codes and scales: frozen parameters.
#[derive(Debug, Clone)]
pub(crate) struct QuantizedWeight {
    pub(crate) form: Form,
    shape: Shape,
    /// The type that it widens to.
    dtype: DType,
    pub(crate) codes: Param,
    /// Of int8: factors of the rows. Of NF4: magnitudes of the blocks, [matrices, blocks].
    pub(crate) scales: Param,
    /// Offset and factors of coded magnitudes.
    pub(crate) nested: Option<Param>,
    /// Of NF4.
    pub(crate) books: Option<Param>,
}

impl Weight {
    pub(crate) fn shape(&self) -> &Shape {
        match self {
            Self::Whole(param) => param.shape(),
            Self::Quantized(weight) => &weight.shape,
        }
    }

    /// The type that products see.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Whole(param) => param.dtype(),
            Self::Quantized(weight) => weight.dtype,
        }
    }

    pub(crate) fn visit(&self, visit: &mut ParamVisitor<'_>, name: &str) {
        match self {
            Self::Whole(param) => visit.param(name, param),
            Self::Quantized(weight) => {
                visit.param(name, &weight.codes);
                visit.param(&format!("{name}.scales"), &weight.scales);
                visit.maybe(&format!("{name}.nested"), weight.nested.as_ref());
                visit.maybe(&format!("{name}.books"), weight.books.as_ref());
            }
        }
    }
}

/// The parts of a quantised weight where kernels read them.
pub(crate) struct OnWorker {
    codes: Tensor,
    scales: Tensor,
    nested: Option<Tensor>,
    books: Option<Tensor>,
}

impl OnWorker {
    pub(crate) fn parts(&self) -> Quantized<'_> {
        match &self.books {
            None => Quantized::Int8 {
                codes: &self.codes,
                factors: &self.scales,
            },
            Some(books) => Quantized::Nf4 {
                codes: &self.codes,
                magnitudes: &self.scales,
                nested: self.nested.as_ref(),
                books,
            },
        }
    }
}

impl QuantizedWeight {
    /// Codes and scales of zeros, to be filled; the books are there.
    pub(crate) fn zeros(form: Form, shape: Shape, dtype: DType) -> TensorResult<Self> {
        let mut dims = shape.dims().to_vec();
        let rank = dims.len();
        let frozen = |dtype, dims: &[usize]| Ok(Param::zeros(dtype, dims)?.frozen());
        let (scales, nested, books) = match form.how {
            Quantization::Int8 => (frozen(DType::F32, &dims[..rank - 1])?, None, None),
            Quantization::Nf4 => {
                dims[rank - 1] /= 2;
                let blocks = shape.numel() / NF4_BLOCK / form.matrices;
                let kind = if form.double { DType::U8 } else { DType::F32 };
                let nested = match form.double {
                    true => Some(frozen(DType::F32, &[form.matrices, nf4_nested(blocks)])?),
                    false => None,
                };
                let books = Param::from_slice(&nf4_books(), &[NF4_BOOKS])?.frozen();
                (frozen(kind, &[form.matrices, blocks])?, nested, Some(books))
            }
        };
        Ok(Self {
            form,
            shape,
            dtype,
            codes: frozen(DType::U8, &dims)?,
            scales,
            nested,
            books,
        })
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Values of one matrix.
    pub(crate) fn of_matrix(&self) -> usize {
        self.shape.numel() / self.form.matrices
    }

    pub(crate) fn get(&self, cx: &mut Cx) -> TensorResult<OnWorker> {
        let maybe = |param: &Option<Param>, cx: &mut Cx| {
            param.as_ref().map(|param| cx.get(param)).transpose()
        };
        Ok(OnWorker {
            codes: cx.get(&self.codes)?,
            scales: cx.get(&self.scales)?,
            nested: maybe(&self.nested, cx)?,
            books: maybe(&self.books, cx)?,
        })
    }

    /// Quantises a whole parameter, a matrix at a time.
    pub(crate) fn fill(&self, from: &Param) -> TensorResult<()> {
        let data = from.data().read_all()?;
        let each = self.of_matrix();
        for matrix in 0..self.form.matrices {
            let here = matrix * each..(matrix + 1) * each;
            match from.dtype() {
                DType::F32 => self.fill_matrix(matrix, &data.as_slice::<f32>()[here])?,
                DType::BF16 => self.fill_matrix(matrix, &data.as_slice::<bf16>()[here])?,
                DType::F16 => self.fill_matrix(matrix, &data.as_slice::<f16>()[here])?,
                DType::F64 => self.fill_matrix(matrix, &data.as_slice::<f64>()[here])?,
                other => {
                    let what = format!("{other} values cannot be quantised");
                    return Err(TensorError::invalid("quantize", what));
                }
            }
        }
        Ok(())
    }

    /// Random codes, and scales that give values about `std`.
    pub(crate) fn fill_at_random(&self, key: RngKey, std: f32) -> TensorResult<()> {
        let mut codes = self.codes.data().write(0..self.codes.bytes())?;
        let tasks = codes.bytes().par_chunks_mut(SHARE);
        tasks.enumerate().for_each(|(task, bytes)| {
            let first = (task * SHARE / 4) as u64;
            for (i, word) in bytes.chunks_mut(4).enumerate() {
                let random = key.word(first + i as u64).to_le_bytes();
                word.copy_from_slice(&random[..word.len()]);
            }
        });
        // A code of eight bits has a mean square of about 74², one of NF4 about 0.57² of the largest.
        let scale = match self.form.how {
            Quantization::Int8 => std / 74.0,
            Quantization::Nf4 => std / 0.57,
        };
        let Some(nested) = &self.nested else {
            let mut scales = self.scales.data().write(0..self.scales.bytes())?;
            scales.as_mut_slice::<f32>().fill(scale);
            return Ok(());
        };
        // Factors are 0, so that the offset of each matrix is what magnitudes are.
        let each = nested.shape()[1];
        let mut nested = nested.data().write(0..nested.bytes())?;
        for matrix in nested.as_mut_slice::<f32>().chunks_mut(each) {
            matrix[0] = scale;
        }
        Ok(())
    }

    /// Quantises matrix `matrix` from its values.
    pub(crate) fn fill_matrix<T: Element>(&self, matrix: usize, values: &[T]) -> TensorResult<()> {
        let wide =
            |values: &[T]| -> Vec<f32> { values.iter().map(|x| x.to_f64() as f32).collect() };
        if self.form.how == Quantization::Int8 {
            let columns = self.shape[self.shape.rank() - 1];
            let rows = values.len() / columns.max(1);
            let first = matrix * rows;
            let mut codes = (self.codes.data()).write(first * columns..(first + rows) * columns)?;
            let mut factors = (self.scales.data()).write(first * 4..(first + rows) * 4)?;
            let tasks = codes.bytes().par_chunks_mut(columns.max(1));
            let tasks = tasks.zip(values.par_chunks(columns.max(1)));
            tasks
                .zip(factors.as_mut_slice::<f32>())
                .for_each(|((codes, row), factor)| *factor = int8_row(&wide(row), codes));
            return Ok(());
        }
        let (bytes, blocks) = (values.len() / 2, values.len() / NF4_BLOCK);
        let mut magnitudes = vec![0f32; blocks];
        let mut codes = (self.codes.data()).write(matrix * bytes..(matrix + 1) * bytes)?;
        let tasks = codes.bytes().par_chunks_mut(SHARE / 2);
        let tasks = tasks.zip(values.par_chunks(SHARE));
        tasks
            .zip(magnitudes.par_chunks_mut(SHARE / NF4_BLOCK))
            .for_each(|((codes, values), magnitudes)| nf4_blocks(&wide(values), codes, magnitudes));
        let size = self.scales.dtype().size();
        let here = matrix * blocks * size..(matrix + 1) * blocks * size;
        let mut scales = self.scales.data().write(here)?;
        let Some(nested) = &self.nested else {
            scales.as_mut_slice::<f32>().copy_from_slice(&magnitudes);
            return Ok(());
        };
        let stride = 4 * nf4_nested(blocks);
        let mut nested = (nested.data()).write(matrix * stride..(matrix + 1) * stride)?;
        nf4_magnitudes(&magnitudes, scales.bytes(), nested.as_mut_slice());
        Ok(())
    }

    /// The values as a whole parameter of the type that they widen to.
    pub(crate) fn widened(&self) -> TensorResult<Param> {
        let whole = Param::zeros(self.dtype, self.shape.dims())?.frozen();
        self.widen_into(&whole.data())?;
        Ok(whole)
    }

    /// The same without memory of its own: codes are widened whenever it is read.
    pub(crate) fn widened_on_read(&self) -> TensorResult<Param> {
        let whole = Param::absent(self.dtype, self.shape.dims())?.frozen();
        self.rehome_on_read(&whole)?;
        Ok(whole)
    }

    /// Gives a whole parameter of the same type and shape a home that is made whenever it is read.
    pub(crate) fn rehome_on_read(&self, whole: &Param) -> TensorResult<()> {
        let codes = self.clone();
        let name = codes.codes.data().name().to_owned();
        let home = HostBuf::made_on_read(name, whole.bytes(), move |home| {
            codes.widen_into(home)?;
            let read = codes.codes.data();
            read.let_go(0..read.len())
        });
        whole.rehome(home)
    }

    pub(crate) fn widen_into(&self, home: &HostBuf) -> TensorResult<()> {
        let mut out = home.write(0..home.len())?;
        match self.dtype {
            DType::BF16 => self.widen(out.as_mut_slice(), bf16::from_f32),
            DType::F16 => self.widen(out.as_mut_slice(), f16::from_f32),
            _ => self.widen(out.as_mut_slice(), |x: f32| x),
        }
    }

    /// `round` takes f32 to the nearest value: by way of f64 some would be rounded twice.
    fn widen<T: Element>(
        &self,
        out: &mut [T],
        round: impl Fn(f32) -> T + Sync,
    ) -> TensorResult<()> {
        let codes = self.codes.data().read_all()?;
        let scales = self.scales.data().read_all()?;
        let Some(books) = &self.books else {
            let columns = self.shape[self.shape.rank() - 1].max(1);
            let rows = codes.bytes().par_chunks(columns);
            let rows = rows.zip(scales.as_slice::<f32>());
            let rows = rows.zip(out.par_chunks_mut(columns));
            rows.for_each(|((codes, factor), out)| {
                for (w, code) in out.iter_mut().zip(codes) {
                    *w = round(int8_value(*code, *factor));
                }
            });
            return Ok(());
        };
        let books = books.to_vec::<f32>()?;
        let nested = match &self.nested {
            Some(nested) => nested.to_vec::<f32>()?,
            None => Vec::new(),
        };
        let blocks = self.of_matrix() / NF4_BLOCK;
        let magnitude = |block: usize| {
            if nested.is_empty() {
                return scales.as_slice::<f32>()[block];
            }
            let stride = nf4_nested(blocks);
            let here = &nested[block / blocks * stride..][..stride];
            let factor = here[1 + block % blocks / NF4_NESTED];
            nf4_magnitude(scales.bytes()[block], factor, here[0], &books)
        };
        let tasks = codes.bytes().par_chunks(NF4_BLOCK / 2).enumerate();
        tasks
            .zip(out.par_chunks_mut(NF4_BLOCK))
            .for_each(|((block, codes), out)| {
                let magnitude = magnitude(block);
                for (pair, code) in out.chunks_exact_mut(2).zip(codes) {
                    for (w, code) in pair.iter_mut().zip([code >> 4, code & 15]) {
                        *w = round(books[usize::from(code)] * magnitude);
                    }
                }
            });
        Ok(())
    }
}
