//! Elementwise kernels on a GPU: fills, copies, arithmetic, comparisons, random numbers.
//!
//! One kernel file (`map.cu`) computes every function of up to three sources: operands are laid
//! over each other with dimensions merged where all of them allow it, then walked in packs of
//! neighbours where they lie side by side and element by element elsewhere. Sequences
//! (`sequence.cu`) and transposed copies (`turn.cu`) have kernels of their own.
//!
//! It refuses, like the cpu, element types that a function does not have.
//!
//! # Invariants
//! - An element's value depends on its sources and its row-major index alone, not on how it was
//!   reached.
//! - Random words are the cpu's: element i takes word i of its key.

use half::{bf16, f16};

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use crate::cpu::elementwise::random::{below, threshold};
use crate::device::{DeviceId, DeviceKind};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kernel::{Binary, Compare, Dist, Kernel, Unary, View};
use crate::rng::RngKey;
use crate::shape::{Layout, Shape};

const MAP: &str = include_str!("kernels/map.cu");
const SEQUENCE: &str = include_str!("kernels/sequence.cu");
const TURN: &str = include_str!("kernels/turn.cu");

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    if call.dst(0).numel() == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Fill { value } => fill(call, *value),
            Kernel::Arange { start, step } => arange(call, *start, *step),
            Kernel::Random { dist, key } => random(call, *dist, *key),
            Kernel::Copy => copy(call),
            Kernel::Accumulate { alpha } => accumulate(call, *alpha),
            Kernel::Unary(op) => unary(call, *op),
            Kernel::UnaryGrad(op) => unary_grad(call, *op),
            Kernel::Binary(op) => binary(call, *op),
            Kernel::Compare(op) => compare(call, *op),
            Kernel::Select => select(call),
            Kernel::Dropout { p, key } => dropout(call, *p, *key),
            _ => Err(unsupported(call)),
        }
    }
}

/// The error for a type this kernel has no code for.
pub(super) fn unsupported(call: &Call<'_>) -> Error {
    let first = call.src.iter().chain(call.dst).flatten().next();
    Error::Unsupported {
        device: DeviceId {
            kind: DeviceKind::Cuda,
            index: call.gpu.index,
            worker: 0,
        },
        op: call.kernel.name(),
        dtype: first.map_or(DType::F32, |v| v.dtype),
    }
}

/// The unsigned type of an element's size.
fn bits(dtype: DType) -> &'static str {
    match dtype.size() {
        8 => "u64",
        4 => "u32",
        2 => "u16",
        _ => "u8",
    }
}

/// The type of common.cuh that a type's arithmetic is done in.
pub(super) fn stage(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 | DType::BF16 | DType::F16 => "float",
        _ => "long long",
    }
}

/// What `map.cu` computes: everything about it but the operands.
struct Map {
    kind: &'static str,
    function: String,
    /// C types of the sources, then of the destination.
    types: Vec<&'static str>,
    stage: &'static str,
    /// 16-bit floats, whose functions need not be exact to the last bit of f32.
    fast: bool,
}

impl Map {
    fn new(kind: &'static str, types: Vec<&'static str>) -> Self {
        Self {
            kind,
            function: "none".to_owned(),
            types,
            stage: "float",
            fast: false,
        }
    }

    fn unit(&self, width: usize) -> Unit {
        let sources = self.types.len() - 1;
        let source = |i: usize| if i < sources { self.types[i] } else { "u8" };
        Unit::new("map", MAP, "map_elements")
            .with("KIND", self.kind)
            .with("FUNCTION", &self.function)
            .with("SOURCES", sources)
            .with("A_T", source(0))
            .with("B_T", source(1))
            .with("C_T", source(2))
            .with("Y_T", self.types[sources])
            .with("STAGE_T", self.stage)
            .with("WIDTH", width)
            .with("FAST", u8::from(self.fast))
    }

    /// # Safety
    /// As [`run`]; `operands` are sources, then the destination, of one shape that is not empty,
    /// with elements of the size of `types`.
    unsafe fn launch(
        &self,
        call: &Call<'_>,
        operands: &[View],
        constants: &Constants,
    ) -> Result<()> {
        let operands = merged(operands)?;
        let width = width(&operands);
        let (y, sources) = operands.split_last().expect("there is a destination");
        let source = |i: usize| sources.get(i).unwrap_or(y);
        let count = y.numel();
        let mut args = Args::new()
            .view(source(0))
            .view(source(1))
            .view(source(2))
            .view(y)
            .size(count)
            .f64(constants.p)
            .f64(constants.q)
            .u64(constants.word)
            .u64(constants.key)
            .u64(constants.high);
        let each = if width == 1 { 4 * 256 } else { 2 * 256 };
        let grid = [count.div_ceil(width).div_ceil(each) as u32, 1, 1];
        // SAFETY: the arguments are those of `map_elements`; the operands are the caller's promise,
        // and `width` packs only what lies side by side and aligned.
        unsafe { call.launch(&self.unit(width), grid, [256, 1, 1], 0, &mut args) }
    }
}

/// Numbers that a function carries.
#[derive(Default)]
struct Constants {
    p: f64,
    q: f64,
    word: u64,
    key: u64,
    high: u64,
}

/// The operands over one shape, with dimensions of size 1 dropped and neighbours merged where every
/// operand's strides allow it; at least one dimension is left.
fn merged(operands: &[View]) -> Result<Vec<View>> {
    let shape = *operands[0].shape();
    let (mut sizes, mut strides) = (Vec::new(), vec![Vec::new(); operands.len()]);
    for (axis, &size) in shape.iter().enumerate() {
        if size == 1 {
            continue;
        }
        let stride = |o: usize| operands[o].layout.strides()[axis];
        let covers = |o: usize| strides[o].last() == Some(&(stride(o) * size as isize));
        let joins = !sizes.is_empty() && (0..operands.len()).all(covers);
        for (o, strides) in strides.iter_mut().enumerate() {
            match strides.last_mut() {
                Some(last) if joins => *last = stride(o),
                _ => strides.push(stride(o)),
            }
        }
        match sizes.last_mut() {
            Some(last) if joins => *last *= size,
            _ => sizes.push(size),
        }
    }
    if sizes.is_empty() {
        sizes.push(1);
        strides.iter_mut().for_each(|strides| strides.push(1));
    }
    let shape = Shape::new(&sizes)?;
    let lay = |(view, strides): (&View, &Vec<isize>)| View {
        layout: Layout::strided(shape, strides),
        ..*view
    };
    Ok(operands.iter().zip(&strides).map(lay).collect())
}

/// How many neighbours a thread moves at once: 8 or 4 where every operand's lie side by side (or
/// are one repeated element) at multiples of what is moved, else 1. The last operand is the
/// destination.
fn width(operands: &[View]) -> usize {
    let smallest = operands.iter().map(|v| v.dtype.size()).min().unwrap_or(8);
    let inner = |v: &View| {
        (
            v.shape().last().copied().unwrap_or(1),
            v.layout.strides().last().copied().unwrap_or(1),
        )
    };
    let fits = |width: usize| {
        operands.iter().enumerate().all(|(i, v)| {
            let (size, stride) = inner(v);
            let outer = &v.layout.strides()[..v.shape().rank() - 1];
            let step = 16.min(width * v.dtype.size());
            let whole = outer.is_empty() || size.is_multiple_of(width);
            let aligned = || {
                v.ptr.is_multiple_of(step as u64)
                    && outer
                        .iter()
                        .all(|s| (s.unsigned_abs() * v.dtype.size()).is_multiple_of(step))
            };
            whole && ((stride == 1 && aligned()) || (stride == 0 && i + 1 < operands.len()))
        })
    };
    let most = (16 / smallest).clamp(4, 8);
    [most, 4]
        .into_iter()
        .find(|width| fits(*width))
        .unwrap_or(1)
}

/// `[] -> [y]`.
unsafe fn fill(call: &Call<'_>, value: f64) -> Result<()> {
    let y = call.dst(0);
    let word = match y.dtype {
        DType::F64 => value.to_bits(),
        DType::F32 => u64::from((value as f32).to_bits()),
        DType::BF16 => u64::from(bf16::from_f64(value).to_bits()),
        DType::F16 => u64::from(f16::from_f64(value).to_bits()),
        DType::I64 => i64::from_f64(value) as u64,
        DType::I32 => u64::from(i32::from_f64(value) as u32),
        DType::U32 => u64::from(u32::from_f64(value)),
        DType::U8 => u64::from(u8::from_f64(value)),
        DType::Bool => u64::from(value != 0.0),
    };
    let constants = Constants {
        word,
        ..Constants::default()
    };
    // SAFETY: promised by the caller.
    unsafe { Map::new("FILL", vec![bits(y.dtype)]).launch(call, &[*y], &constants) }
}

/// `[x] -> [y]`.
unsafe fn copy(call: &Call<'_>) -> Result<()> {
    let (x, y) = (*call.src(0), *call.dst(0));
    // SAFETY: promised by the caller.
    unsafe {
        if x.dtype != y.dtype {
            return cast_map(x.dtype, y.dtype).launch(call, &[x, y], &Constants::default());
        }
        match TransposedCopy::new(&x, &y)? {
            Some(transposed) => transposed.launch(call),
            None => Map::new("SAME", vec![bits(x.dtype), bits(y.dtype)]).launch(
                call,
                &[x, y],
                &Constants::default(),
            ),
        }
    }
}

fn cast_map(from: DType, to: DType) -> Map {
    Map::new("COPY", vec![c_type(from), c_type(to)])
}

/// A copy whose two sides lie side by side along different dimensions.
struct TransposedCopy {
    dtype: DType,
    /// The other dimensions of both sides.
    planes: [View; 2],
    rows: usize,
    columns: usize,
    /// Strides of x along the columns and of y along the rows.
    x_column: isize,
    y_row: isize,
}

impl TransposedCopy {
    /// `None` for other copies, and for those too small to matter.
    fn new(x: &View, y: &View) -> Result<Option<Self>> {
        let merged = merged(&[*x, *y])?;
        let [from, to] = [merged[0], merged[1]];
        let sizes = from.shape().dims().to_vec();
        let (along, across) = (from.layout.strides().to_vec(), to.layout.strides().to_vec());
        let dense = |strides: &[isize]| strides.iter().rposition(|stride| *stride == 1);
        let (Some(row), Some(column)) = (dense(&along), dense(&across)) else {
            return Ok(None);
        };
        if row == column || sizes[row] < 8 || sizes[column] < 8 || x.numel() < 4096 {
            return Ok(None);
        }
        let rest: Vec<usize> = (0..sizes.len())
            .filter(|axis| *axis != row && *axis != column)
            .collect();
        let pick = |values: &[isize]| rest.iter().map(|axis| values[*axis]).collect::<Vec<_>>();
        let shape = Shape::new(&rest.iter().map(|axis| sizes[*axis]).collect::<Vec<_>>())?;
        let outer = |view: View, strides: &[isize]| View {
            layout: Layout::strided(shape, &pick(strides)),
            ..view
        };
        Ok(Some(Self {
            dtype: x.dtype,
            planes: [outer(from, &along), outer(to, &across)],
            rows: sizes[row],
            columns: sizes[column],
            x_column: along[column],
            y_row: across[row],
        }))
    }

    fn unit(dtype: DType) -> Unit {
        Unit::new("turn", TURN, "turn_planes").with("BITS_T", bits(dtype))
    }

    /// # Safety
    /// As [`run`].
    unsafe fn launch(&self, call: &Call<'_>) -> Result<()> {
        let squares = self.rows.div_ceil(32) * self.columns.div_ceil(32) * self.planes[0].numel();
        let mut args = Args::new()
            .view(&self.planes[0])
            .view(&self.planes[1])
            .size(self.rows)
            .size(self.columns)
            .i64(self.x_column as i64)
            .i64(self.y_row as i64);
        // SAFETY: the arguments are those of `turn_planes`; the views are the caller's promise.
        unsafe {
            call.launch(
                &Self::unit(self.dtype),
                [squares as u32, 1, 1],
                [32, 8, 1],
                0,
                &mut args,
            )
        }
    }
}

/// `[x] -> [y]`: y += alpha · x.
unsafe fn accumulate(call: &Call<'_>, alpha: f64) -> Result<()> {
    let (x, y) = (*call.src(0), *call.dst(0));
    if x.dtype.is_float() && !y.dtype.is_float() {
        return Err(unsupported(call));
    }
    let constants = Constants {
        p: alpha,
        ..Constants::default()
    };
    // SAFETY: promised by the caller; y is read before it is written, by the same thread.
    unsafe { accumulate_map(x.dtype, y.dtype).launch(call, &[x, y, y], &constants) }
}

fn accumulate_map(x: DType, y: DType) -> Map {
    let wide = if x == DType::F64 { x } else { y };
    Map {
        stage: stage(wide),
        ..Map::new("ACCUMULATE", vec![c_type(x), c_type(y), c_type(y)])
    }
}

/// The name of a function in `map.cu` and the numbers it carries.
fn function(op: Unary) -> (&'static str, [f64; 2]) {
    let plain = |name| (name, [0.0; 2]);
    match op {
        Unary::Neg => ("neg", [-1.0, 0.0]),
        Unary::Abs => plain("abs"),
        Unary::Sign => plain("sign"),
        Unary::Exp => plain("exp"),
        Unary::Log => plain("log"),
        Unary::Sqrt => plain("sqrt"),
        Unary::Rsqrt => plain("rsqrt"),
        Unary::Recip => plain("recip"),
        Unary::Square => plain("square"),
        Unary::Sin => plain("sin"),
        Unary::Cos => plain("cos"),
        Unary::Tanh => plain("tanh"),
        Unary::Sigmoid => plain("sigmoid"),
        Unary::Erf => plain("erf"),
        Unary::Relu => plain("relu"),
        Unary::Silu => plain("silu"),
        Unary::Gelu => plain("gelu"),
        Unary::GeluTanh => plain("gelu_tanh"),
        Unary::Softplus => plain("softplus"),
        Unary::LeakyRelu(p) => ("leaky_relu", [p, 0.0]),
        Unary::Elu(p) => ("elu", [p, 0.0]),
        Unary::Floor => plain("floor"),
        Unary::Ceil => plain("ceil"),
        Unary::Round => plain("round"),
        Unary::Affine { mul, add } => ("affine", [mul, add]),
        Unary::Powf(p) => ("powf", [p, 0.0]),
        Unary::Clamp { min, max } => ("clamp", [min, max]),
        Unary::Not => plain("not"),
    }
}

/// Whether a function exists for a type.
fn has(op: Unary, dtype: DType) -> bool {
    let whole = matches!(
        op,
        Unary::Neg
            | Unary::Abs
            | Unary::Sign
            | Unary::Square
            | Unary::Relu
            | Unary::Floor
            | Unary::Ceil
            | Unary::Round
            | Unary::Affine { .. }
            | Unary::Clamp { .. }
    );
    if dtype.is_float() {
        op != Unary::Not
    } else {
        whole || op == Unary::Not
    }
}

fn unary_map(op: Unary, dtype: DType, grad: bool) -> Map {
    let t = c_type(dtype);
    let (kind, prefix, types) = if grad {
        ("UNARY_GRAD", "d", vec![t; 3])
    } else {
        ("UNARY", "f", vec![t; 2])
    };
    let fast = matches!(dtype, DType::BF16 | DType::F16);
    Map {
        function: format!("{prefix}_{}", function(op).0),
        fast,
        ..Map::new(kind, types)
    }
}

/// `[x] -> [y]`, same types.
unsafe fn unary(call: &Call<'_>, op: Unary) -> Result<()> {
    let (x, y) = (*call.src(0), *call.dst(0));
    if x.dtype != y.dtype || !has(op, y.dtype) {
        return Err(unsupported(call));
    }
    let [p, q] = function(op).1;
    let constants = Constants {
        p,
        q,
        ..Constants::default()
    };
    // SAFETY: promised by the caller.
    unsafe { unary_map(op, y.dtype, false).launch(call, &[x, y], &constants) }
}

/// `[x, dy] -> [dx]`, same types.
unsafe fn unary_grad(call: &Call<'_>, op: Unary) -> Result<()> {
    let (x, dy, dx) = (*call.src(0), *call.src(1), *call.dst(0));
    if x.dtype != dx.dtype || dy.dtype != dx.dtype || !dx.dtype.is_float() || op == Unary::Not {
        return Err(unsupported(call));
    }
    let [p, q] = function(op).1;
    let constants = Constants {
        p,
        q,
        ..Constants::default()
    };
    // SAFETY: promised by the caller.
    unsafe { unary_map(op, dx.dtype, true).launch(call, &[x, dy, dx], &constants) }
}

fn binary_map(op: Binary, dtype: DType) -> Map {
    let name = match op {
        Binary::Add => "b_add",
        Binary::Sub => "b_sub",
        Binary::Mul => "b_mul",
        Binary::Div => "b_div",
        Binary::Pow => "b_pow",
        Binary::Max => "b_max",
        Binary::Min => "b_min",
        Binary::And => "b_and",
        Binary::Or => "b_or",
        Binary::Xor => "b_xor",
    };
    Map {
        function: name.to_owned(),
        ..Map::new("BINARY", vec![c_type(dtype); 3])
    }
}

/// `[a, b] -> [y]`, same types.
unsafe fn binary(call: &Call<'_>, op: Binary) -> Result<()> {
    let (a, b, y) = (*call.src(0), *call.src(1), *call.dst(0));
    let logic = matches!(op, Binary::And | Binary::Or | Binary::Xor);
    if a.dtype != y.dtype || b.dtype != y.dtype || (logic && y.dtype.is_float()) {
        return Err(unsupported(call));
    }
    // SAFETY: promised by the caller.
    unsafe { binary_map(op, y.dtype).launch(call, &[a, b, y], &Constants::default()) }
}

fn compare_map(op: Compare, dtype: DType) -> Map {
    let name = match op {
        Compare::Eq => "c_eq",
        Compare::Ne => "c_ne",
        Compare::Lt => "c_lt",
        Compare::Le => "c_le",
        Compare::Gt => "c_gt",
        Compare::Ge => "c_ge",
    };
    Map {
        function: name.to_owned(),
        ..Map::new("COMPARE", vec![c_type(dtype), c_type(dtype), "u8"])
    }
}

/// `[a, b] -> [y: bool]`, same types.
unsafe fn compare(call: &Call<'_>, op: Compare) -> Result<()> {
    let (a, b, y) = (*call.src(0), *call.src(1), *call.dst(0));
    if a.dtype != b.dtype || y.dtype.size() != 1 {
        return Err(unsupported(call));
    }
    // SAFETY: promised by the caller.
    unsafe { compare_map(op, a.dtype).launch(call, &[a, b, y], &Constants::default()) }
}

fn select_map(dtype: DType) -> Map {
    let t = bits(dtype);
    Map::new("SELECT", vec!["u8", t, t, t])
}

/// `[cond: bool, a, b] -> [y]`: moves bits.
unsafe fn select(call: &Call<'_>) -> Result<()> {
    let (cond, a, b, y) = (*call.src(0), *call.src(1), *call.src(2), *call.dst(0));
    if a.dtype != y.dtype || b.dtype != y.dtype || cond.dtype.size() != 1 {
        return Err(unsupported(call));
    }
    // SAFETY: promised by the caller.
    unsafe { select_map(y.dtype).launch(call, &[cond, a, b, y], &Constants::default()) }
}

fn dropout_map(dtype: DType) -> Map {
    Map::new("DROPOUT", vec![c_type(dtype); 2])
}

/// `[x] -> [y]`, same float types.
unsafe fn dropout(call: &Call<'_>, p: f64, key: RngKey) -> Result<()> {
    let (x, y) = (*call.src(0), *call.dst(0));
    if x.dtype != y.dtype || !y.dtype.is_float() {
        return Err(unsupported(call));
    }
    let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    let (key, high) = key.parts();
    let constants = Constants {
        p: scale,
        q: 0.0,
        word: threshold(p),
        key,
        high,
    };
    // SAFETY: promised by the caller.
    unsafe { dropout_map(y.dtype).launch(call, &[x, y], &constants) }
}

fn sequence(entry: &'static str, dtype: DType) -> Unit {
    Unit::new("sequence", SEQUENCE, entry).with("Y_T", c_type(dtype))
}

/// Whether four elements can be stored at once.
fn packed(y: &View) -> i32 {
    i32::from(y.ptr.is_multiple_of(16.min(4 * y.dtype.size() as u64)))
}

/// `[] -> [y]`: start + i · step.
unsafe fn arange(call: &Call<'_>, start: f64, step: f64) -> Result<()> {
    let y = call.dst(0);
    let count = y.numel();
    let mut args = Args::new()
        .ptr(y.ptr)
        .size(count)
        .i32(packed(y))
        .f64(start)
        .f64(step);
    let unit = sequence("fill_arange", y.dtype);
    // SAFETY: the arguments are those of `fill_arange`; y is dense by contract.
    unsafe {
        call.launch(
            &unit,
            Call::blocks(count.div_ceil(4)),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

fn random_unit(dist: Dist, dtype: DType) -> Unit {
    let name = match dist {
        Dist::Uniform { .. } => "UNIFORM",
        Dist::Normal { .. } => "NORMAL",
        Dist::Bernoulli { .. } => "BERNOULLI",
    };
    sequence("fill_random", dtype).with("DIST", name)
}

/// `[] -> [y]`: a value per element.
unsafe fn random(call: &Call<'_>, dist: Dist, key: RngKey) -> Result<()> {
    let y = call.dst(0);
    if !y.dtype.is_float() && !matches!(dist, Dist::Bernoulli { .. }) {
        return Err(unsupported(call));
    }
    let (p, q, top, limit) = match dist {
        Dist::Uniform { low, high } => (low, high - low, below(y.dtype, high), 0),
        Dist::Normal { mean, std } => (mean, std, 0.0, 0),
        Dist::Bernoulli { p } => (0.0, 0.0, 0.0, threshold(p)),
    };
    let (key, high) = key.parts();
    let count = y.numel();
    let mut args = Args::new()
        .ptr(y.ptr)
        .size(count)
        .i32(packed(y))
        .f64(p)
        .f64(q)
        .f64(top)
        .u64(limit)
        .u64(key);
    args = args.u64(high);
    let unit = random_unit(dist, y.dtype);
    // SAFETY: the arguments are those of `fill_random`; y is dense by contract.
    unsafe {
        call.launch(
            &unit,
            Call::blocks(count.div_ceil(4)),
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// Every function in the types that have it.
pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    units.extend([DType::F64, DType::F32, DType::F16, DType::U8].map(TransposedCopy::unit));
    for name in ["u8", "u16", "u32", "u64"] {
        units.push(Map::new("FILL", vec![name]).unit(8));
        units.push(Map::new("SAME", vec![name; 2]).unit(8));
        units.push(Map::new("SAME", vec![name; 2]).unit(1));
    }
    for from in DType::ALL {
        let others = [DType::F32, DType::BF16, DType::I64, DType::Bool]
            .into_iter()
            .filter(|to| *to != from);
        units.extend(others.map(|to| cast_map(from, to).unit(8)));
    }
    units.extend(
        [DType::F64, DType::F16, DType::I32, DType::U32, DType::U8]
            .map(|to| cast_map(DType::F32, to).unit(8)),
    );
    for x in [DType::F64, DType::F32, DType::BF16, DType::I64, DType::Bool] {
        units.push(compare_map(Compare::Eq, x).unit(8));
        units.push(select_map(x).unit(8));
        units.push(sequence("fill_arange", x));
        units.push(random_unit(Dist::Bernoulli { p: 0.5 }, x));
        units.push(accumulate_map(x, x).unit(8));
    }
    for x in FLOATS {
        units.extend([DType::F64, DType::F32].map(|y| accumulate_map(x, y).unit(8)));
        units.push(dropout_map(x).unit(8));
        units.push(dropout_map(x).unit(1));
        units.push(random_unit(
            Dist::Uniform {
                low: 0.0,
                high: 1.0,
            },
            x,
        ));
        units.push(random_unit(
            Dist::Normal {
                mean: 0.0,
                std: 1.0,
            },
            x,
        ));
        let numbers = [
            Binary::Add,
            Binary::Sub,
            Binary::Mul,
            Binary::Div,
            Binary::Pow,
            Binary::Max,
            Binary::Min,
        ];
        units.extend(numbers.map(|op| binary_map(op, x).unit(if x.size() > 2 { 4 } else { 8 })));
        for op in FUNCTIONS.into_iter().filter(|op| has(*op, x)) {
            units.push(unary_map(op, x, false).unit(if x.size() > 2 { 4 } else { 8 }));
            units.push(unary_map(op, x, true).unit(if x.size() > 2 { 4 } else { 8 }));
        }
    }
    for x in [DType::I64, DType::Bool] {
        units.extend(
            FUNCTIONS
                .into_iter()
                .filter(|op| has(*op, x))
                .map(|op| unary_map(op, x, false).unit(1)),
        );
    }
    let logic = [
        Binary::And,
        Binary::Or,
        Binary::Xor,
        Binary::Pow,
        Binary::Div,
    ];
    units.extend(logic.map(|op| binary_map(op, DType::Bool).unit(8)));
    units.extend(logic.map(|op| binary_map(op, DType::I32).unit(4)));
    units
}

/// Every function of one value, with any constants.
const FUNCTIONS: [Unary; 28] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Sign,
    Unary::Exp,
    Unary::Log,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Recip,
    Unary::Square,
    Unary::Sin,
    Unary::Cos,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::Erf,
    Unary::Relu,
    Unary::Silu,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Softplus,
    Unary::LeakyRelu(0.1),
    Unary::Elu(1.0),
    Unary::Floor,
    Unary::Ceil,
    Unary::Round,
    Unary::Affine { mul: 1.0, add: 0.0 },
    Unary::Powf(2.0),
    Unary::Clamp { min: 0.0, max: 1.0 },
    Unary::Not,
];

#[cfg(test)]
mod tests {
    use super::{TransposedCopy, merged, width};
    use crate::dtype::DType;
    use crate::kernel::View;
    use crate::shape::{Layout, Shape};

    fn view(dtype: DType, sizes: &[usize], strides: &[isize]) -> View {
        View {
            ptr: 4096,
            dtype,
            layout: Layout::strided(Shape::new(sizes).unwrap(), strides),
        }
    }

    fn offset(sizes: &[usize], strides: &[isize], mut i: usize) -> isize {
        let mut at = 0;
        for (size, stride) in sizes.iter().zip(strides).rev() {
            at += (i % size) as isize * stride;
            i /= size;
        }
        at
    }

    /// Merging moves no element of any operand.
    #[test]
    fn merged_operands_are_walked_in_the_same_order() {
        let shapes: [(&[usize], [&[isize]; 2]); 6] = [
            (&[3, 4, 5], [&[20, 5, 1], &[20, 5, 1]]),
            (&[3, 4, 5], [&[20, 5, 1], &[0, 5, 1]]),
            (&[3, 1, 5], [&[5, 99, 1], &[1, 7, 3]]),
            (&[4, 6], [&[1, 4], &[6, 1]]),
            (&[4, 6], [&[0, 0], &[6, 1]]),
            (&[1, 1], [&[5, 3], &[0, 0]]),
        ];
        for (sizes, strides) in shapes {
            let operands = strides.map(|strides| view(DType::F32, sizes, strides));
            let merged = merged(&operands).unwrap();
            for (strides, merged) in strides.iter().zip(&merged) {
                let count: usize = sizes.iter().product();
                assert_eq!(merged.numel(), count);
                for i in 0..count {
                    let now = offset(merged.shape(), merged.layout.strides(), i);
                    assert_eq!(
                        now,
                        offset(sizes, strides, i),
                        "{sizes:?} {strides:?} element {i}"
                    );
                }
            }
        }
    }

    /// Packs are used where they may be, and never where they would cross a row or an alignment.
    #[test]
    fn packs_only_where_memory_allows() {
        let wide = |operands: &[View]| width(&merged(operands).unwrap());
        let dense = view(DType::BF16, &[64, 48], &[48, 1]);
        assert_eq!(wide(&[dense, dense]), 8);
        assert_eq!(wide(&[view(DType::BF16, &[48], &[1]); 2]), 8);
        assert_eq!(
            wide(&[view(DType::F32, &[7], &[1]); 2]),
            4,
            "one row may end anywhere"
        );
        assert_eq!(
            wide(&[view(DType::BF16, &[64, 48], &[0, 1]), dense]),
            8,
            "a repeated row"
        );
        assert_eq!(
            wide(&[view(DType::BF16, &[64, 48], &[1, 0]), dense]),
            8,
            "a repeated column"
        );
        let odd = view(DType::BF16, &[64, 47], &[47, 1]);
        assert_eq!(wide(&[view(DType::BF16, &[64, 47], &[0, 1]), odd]), 1);
        assert_eq!(wide(&[view(DType::BF16, &[64, 48], &[52, 1]), dense]), 4);
        assert_eq!(wide(&[View { ptr: 4098, ..dense }, dense]), 1);
        assert_eq!(
            wide(&[
                view(DType::U8, &[64, 48], &[48, 1]),
                view(DType::F32, &[64, 48], &[48, 1])
            ]),
            8
        );
        assert_eq!(
            wide(&[
                view(DType::F32, &[64, 48], &[1, 64]),
                view(DType::F32, &[64, 48], &[48, 1])
            ]),
            1
        );
    }

    /// The squares of a transposed copy cover every element once, on both sides.
    #[test]
    fn turned_copies_name_both_sides() {
        let sizes: [usize; 4] = if cfg!(miri) {
            [2, 40, 2, 30]
        } else {
            [3, 40, 5, 70]
        };
        let [_, b, c, d] = sizes.map(|size| size as isize);
        let x = view(DType::F32, &sizes, &[b * c * d, 1, b, b * c]);
        let y = view(DType::F32, &sizes, &[b * c * d, c * d, d, 1]);
        let transposed = TransposedCopy::new(&x, &y).unwrap().unwrap();
        let mut pairs = Vec::new();
        for plane in 0..transposed.planes[0].numel() {
            let [from, to] = transposed
                .planes
                .map(|v| offset(v.shape(), v.layout.strides(), plane));
            for r in 0..transposed.rows {
                for c in 0..transposed.columns {
                    let from = from + r as isize + c as isize * transposed.x_column;
                    pairs.push((to + r as isize * transposed.y_row + c as isize, from));
                }
            }
        }
        let place = |v: &View, i| offset(v.shape(), v.layout.strides(), i);
        let mut want: Vec<_> = (0..x.numel())
            .map(|i| (place(&y, i), place(&x, i)))
            .collect();
        pairs.sort_unstable();
        want.sort_unstable();
        assert_eq!(pairs, want);
        assert!(TransposedCopy::new(&y, &y).unwrap().is_none());
    }
}
