//! Convolution and its gradients as matrix products over columns.

use std::ops::Range;

use super::depthwise;
use super::lattice::{Axis, PositionBlock, PositionSplit, Tap, WindowAxis};
use crate::cpu::access::{Call, Float, Real, SharedSlice, slice, slice_mut};
use crate::cpu::gemm::{GemmElement as Factor, Mat, MatMut, Product, gemm_batch};
use crate::cpu::simd::vectorize;
use crate::dtype::{DType, Element};
use crate::kernel::{ConvSpec, View};
use crate::shape::Shape;

/// A float type that products are made of.
pub(super) trait ConvFloat:
    Float<Acc: Factor<Sum = <Self as Float>::Acc>> + Factor<Sum = <Self as Float>::Acc>
{
}
impl<T> ConvFloat for T where
    T: Float<Acc: Factor<Sum = <T as Float>::Acc>> + Factor<Sum = <T as Float>::Acc>
{
}

/// A filter moved over a batch of images: what meets what, in which direction does not matter.
pub(super) struct ConvJob {
    pub images: usize,
    /// Channels of the source and of the destination, both in `groups`.
    pub from: usize,
    pub to: usize,
    pub groups: usize,
    pub rows: Axis,
    pub cols: Axis,
    /// Height and width of the destination.
    pub plane: [usize; 2],
}

impl ConvJob {
    /// From the images to the outputs.
    fn forward(spec: &ConvSpec, x: &Shape, f: &Shape, y: &Shape) -> Self {
        let axis = |a: usize| Axis::forward(x[2 + a], y[2 + a], window(spec, f, a));
        let (rows, cols) = (axis(0), axis(1));
        Self {
            images: x[0],
            from: x[1],
            to: y[1],
            groups: spec.groups,
            rows,
            cols,
            plane: [y[2], y[3]],
        }
    }

    /// From the outputs' gradient to the images', for the elements with these residues of the
    /// stride.
    fn backward(spec: &ConvSpec, dy: &Shape, f: &Shape, dx: &Shape, residue: [usize; 2]) -> Self {
        let axis = |a: usize| Axis::backward(dx[2 + a], dy[2 + a], window(spec, f, a), residue[a]);
        let (rows, cols) = (axis(0), axis(1));
        Self {
            images: dy[0],
            from: dy[1],
            to: dx[1],
            groups: spec.groups,
            rows,
            cols,
            plane: [dx[2], dx[3]],
        }
    }

    /// [`ConvJob::backward`] for every residue that has elements.
    fn all_backward(
        spec: &ConvSpec,
        dy: &Shape,
        f: &Shape,
        dx: &Shape,
    ) -> impl Iterator<Item = Self> {
        let reach = |a: usize| spec.stride[a].min(dx[2 + a]);
        let (spec, dy, f, dx, across) = (*spec, *dy, *f, *dx, reach(1));
        let residues = (0..reach(0)).flat_map(move |i| (0..across).map(move |j| [i, j]));
        residues.map(move |residue| Self::backward(&spec, &dy, &f, &dx, residue))
    }

    fn positions(&self) -> usize {
        self.rows.count * self.cols.count
    }

    pub fn taps(&self) -> usize {
        self.rows.taps.len() * self.cols.taps.len()
    }

    /// Products per output element.
    pub fn depth(&self) -> usize {
        self.from / self.groups * self.taps()
    }

    fn cut(&self, dtype: DType) -> PositionSplit {
        let bytes = self.from * self.taps() * dtype.size() + self.to * dtype.accumulator().size();
        PositionSplit::new(self.images, self.positions(), bytes)
    }

    /// Elements of the columns and of the sums.
    fn buffers(&self, dtype: DType) -> (usize, usize) {
        let columns = self.cut(dtype).columns();
        (self.from * self.taps() * columns, self.to * columns)
    }

    /// Bytes of both.
    fn bytes(&self, dtype: DType) -> usize {
        let (columns, sums) = self.buffers(dtype);
        room(columns, dtype) + room(sums, dtype.accumulator())
    }
}

fn window(spec: &ConvSpec, f: &Shape, a: usize) -> WindowAxis {
    let ConvSpec {
        stride,
        padding,
        dilation,
        ..
    } = spec;
    WindowAxis {
        kernel: f[2 + a],
        stride: stride[a],
        padding: padding[a],
        dilation: dilation[a],
    }
}

/// One channel per group: too little to share between outputs for a matrix product.
fn is_depthwise(f: &Shape) -> bool {
    f[1] == 1
}

/// Bytes of a part of the scratch memory, so that the next one is aligned.
fn room(elements: usize, dtype: DType) -> usize {
    (elements * dtype.size()).next_multiple_of(64)
}

/// Takes `len` elements off the front of the scratch memory.
///
/// # Safety
/// The scratch memory of the call is at least as large as all parts, and parts are taken once.
unsafe fn carve<'a, T: Element>(call: &Call<'_>, used: &mut usize, len: usize) -> &'a mut [T] {
    if len == 0 {
        return &mut [];
    }
    let scratch = call.scratch.as_ref().expect("declared by `scratch`");
    let start = *used;
    *used += room(len, T::DTYPE);
    assert!(
        *used <= scratch.numel(),
        "{:?}: scratch of {} bytes is too small",
        call.kernel,
        scratch.numel()
    );
    // SAFETY: inside the scratch by the assertion; parts do not overlap because `used` only grows;
    // starts are multiples of 64 of an aligned block; every bit pattern is an element.
    unsafe { std::slice::from_raw_parts_mut((scratch.ptr as usize + start) as *mut T, len) }
}

pub(super) fn forward_scratch(spec: &ConvSpec, x: &View, f: &View, y: &View) -> usize {
    if is_depthwise(f.shape()) {
        return 0;
    }
    ConvJob::forward(spec, x.shape(), f.shape(), y.shape()).bytes(x.dtype)
}

pub(super) fn grad_input_scratch(spec: &ConvSpec, dy: &View, f: &View, dx: &View) -> usize {
    let filter = room(f.numel(), f.dtype);
    if is_depthwise(f.shape()) {
        return filter;
    }
    let jobs = ConvJob::all_backward(spec, dy.shape(), f.shape(), dx.shape());
    filter + jobs.map(|job| job.bytes(dy.dtype)).max().unwrap_or(0)
}

pub(super) fn grad_filter_scratch(spec: &ConvSpec, x: &View, dy: &View, df: &View) -> usize {
    if is_depthwise(df.shape()) {
        return 0;
    }
    let job = ConvJob::forward(spec, x.shape(), df.shape(), dy.shape());
    let (columns, sums) = job.buffers(x.dtype);
    room(columns, x.dtype) + room(sums, x.dtype)
}

/// `[x, f, bias?] -> [y]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); the operands are T.
pub(super) unsafe fn forward<T: ConvFloat>(call: &Call<'_>, spec: &ConvSpec) {
    let (x, f, y) = (call.src(0), call.src(1), call.dst(0));
    let job = ConvJob::forward(spec, x.shape(), f.shape(), y.shape());
    // SAFETY: contiguous operands of T by the kernel's description; the destination overlaps none.
    unsafe {
        let bias = call.src_opt(2).map(|b| slice::<T>(b));
        let y = SharedSlice::new(slice_mut::<T>(y));
        if is_depthwise(f.shape()) {
            depthwise::correlate(call, &job, slice(x), slice(f), bias, y);
        } else {
            correlate(call, &job, slice(x), slice(f), bias, y, &mut 0);
        }
    }
}

/// `[dy, f] -> [dx]`.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); the operands are T.
pub(super) unsafe fn grad_input<T: ConvFloat>(call: &Call<'_>, spec: &ConvSpec) {
    let (dy, f, dx) = (call.src(0), call.src(1), call.dst(0));
    let mut used = 0;
    // SAFETY: contiguous operands of T by the kernel's description; the destination overlaps none;
    // the filter's copy is the first part of the scratch.
    unsafe {
        let transposed = carve::<T>(call, &mut used, f.numel());
        let out = SharedSlice::new(slice_mut::<T>(dx));
        for job in ConvJob::all_backward(spec, dy.shape(), f.shape(), dx.shape()) {
            transpose_filter(call, &job, f.shape(), slice(f), transposed);
            if is_depthwise(f.shape()) {
                depthwise::correlate(call, &job, slice(dy), transposed, None, out);
            } else {
                correlate(
                    call,
                    &job,
                    slice(dy),
                    transposed,
                    None,
                    out,
                    &mut used.clone(),
                );
            }
        }
    }
}

/// Brings the filter `[o, c/g, kh, kw]` into the order `[c, o/g, taps]` of the way back.
fn transpose_filter<T: Float>(
    call: &Call<'_>,
    job: &ConvJob,
    shape: &Shape,
    f: &[T],
    out: &mut [T],
) {
    let (per_group, kernel) = (shape[1], [shape[2], shape[3]]);
    let (out_group, depth) = (job.from / job.groups, job.depth());
    let out = SharedSlice::new(&mut out[..job.to * depth]);
    call.pieces(job.to, (1 << 15) / depth.max(1), |start, end| {
        for c in start..end {
            // SAFETY: each channel is transposed by one task.
            let line = unsafe { out.part(c * depth, (c + 1) * depth) };
            let mut line = line.iter_mut();
            for o in 0..out_group {
                let filter = (c / per_group * out_group + o) * per_group + c % per_group;
                for row in &job.rows.taps {
                    for col in &job.cols.taps {
                        let value = f[(filter * kernel[0] + row.at) * kernel[1] + col.at];
                        *line.next().expect("a line holds every tap") = value;
                    }
                }
            }
        }
    });
}

/// Moves `filter: [to, depth]` over `src`, a block of positions at a time, and writes the job's
/// elements of `dst`. Scratch is taken from `used` on.
fn correlate<T: ConvFloat>(
    call: &Call<'_>,
    job: &ConvJob,
    src: &[T],
    filter: &[T],
    bias: Option<&[T]>,
    dst: SharedSlice<'_, T>,
    used: &mut usize,
) {
    let (columns, sums) = job.buffers(T::DTYPE);
    // SAFETY: `ConvJob::bytes` declared both parts.
    let (columns, sums) = unsafe {
        (
            carve::<T>(call, used, columns),
            carve::<T::Acc>(call, used, sums),
        )
    };
    let source = ColumnSource {
        data: src,
        channels: job.from,
        rows: &job.rows,
        cols: &job.cols,
    };
    let (rows, depth) = (job.to / job.groups, job.depth());
    for block in job.cut(T::DTYPE).blocks() {
        let width = block.columns();
        let columns = source.columns(call, &block, columns);
        let sums = &mut sums[..job.to * width];
        let out = SharedSlice::new(sums);
        // SAFETY: the filter has `to` rows of `depth`, the columns `from · taps` rows of `width`,
        // the sums `to` rows of `width`; each group's rows of them are its own.
        unsafe {
            gemm_batch(call.threads, job.groups, |g| Product {
                m: rows,
                n: width,
                k: depth,
                a: Mat {
                    ptr: filter.as_ptr().wrapping_add(g * rows * depth),
                    row: depth as isize,
                    col: 1,
                },
                b: columns.rows_from(g * depth),
                c: MatMut {
                    ptr: out
                        .part(g * rows * width, (g + 1) * rows * width)
                        .as_mut_ptr(),
                    row: width as isize,
                },
                bias: None,
                alpha: 1.0,
                beta: 0.0,
            });
        }
        store_block(call, job, &block, sums, bias, dst);
    }
}

/// Rounds a block's sums `[to, columns]` into their places, with the bias.
fn store_block<T: Float>(
    call: &Call<'_>,
    job: &ConvJob,
    block: &PositionBlock,
    sums: &[T::Acc],
    bias: Option<&[T]>,
    dst: SharedSlice<'_, T>,
) {
    let width = block.columns();
    let [height, across] = job.plane;
    let dense = job.rows.stride == 1 && job.cols.stride == 1;
    call.pieces(job.to, (1 << 15) / width.max(1), |start, end| {
        for channel in start..end {
            let bias = bias.map_or(T::Acc::ZERO, |b| b[channel].up());
            let mut sums = &sums[channel * width..(channel + 1) * width];
            for image in block.images.clone() {
                let here;
                (here, sums) = sums.split_at(block.positions.len());
                let plane = (image * job.to + channel) * height * across;
                // SAFETY: a plane belongs to one image and channel, hence to one task; blocks run
                // one after the other.
                let plane = unsafe { dst.part(plane, plane + height * across) };
                if dense {
                    round::<T>(here, bias, &mut plane[block.positions.clone()]);
                    continue;
                }
                for (p, sum) in block.positions.clone().zip(here) {
                    let (i, j) = (p / job.cols.count, p % job.cols.count);
                    let row = job.rows.first + i * job.rows.stride;
                    plane[row * across + job.cols.first + j * job.cols.stride] =
                        T::down(*sum + bias);
                }
            }
        }
    });
}

vectorize! {
    fn round<T: Float>(sums: &[T::Acc], bias: T::Acc, out: &mut [T]) {
        for (y, sum) in out.iter_mut().zip(sums) {
            *y = T::down(*sum + bias);
        }
    }
}

/// `[x, dy] -> [df]`: blocks of positions are added in order.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch); the sources are T, the destination its
/// accumulator.
pub(super) unsafe fn grad_filter<T: ConvFloat>(call: &Call<'_>, spec: &ConvSpec, accumulate: bool) {
    let (x, dy, df) = (call.src(0), call.src(1), call.dst(0));
    let job = ConvJob::forward(spec, x.shape(), df.shape(), dy.shape());
    // SAFETY: contiguous operands by the kernel's description; the destination overlaps none.
    let (x, dy, df) = unsafe { (slice::<T>(x), slice::<T>(dy), slice_mut::<T::Acc>(df)) };
    if is_depthwise(call.dst(0).shape()) {
        return depthwise::grad_filter(call, &job, x, dy, df, accumulate);
    }
    if !accumulate {
        df.fill(T::Acc::ZERO);
    }
    let (columns, gathered) = job.buffers(T::DTYPE);
    let mut used = 0;
    // SAFETY: `grad_filter_scratch` declared both parts.
    let (columns, gathered) = unsafe {
        (
            carve::<T>(call, &mut used, columns),
            carve::<T>(call, &mut used, gathered),
        )
    };
    let source = ColumnSource {
        data: x,
        channels: job.from,
        rows: &job.rows,
        cols: &job.cols,
    };
    let same = [Axis::identity(job.plane[0]), Axis::identity(job.plane[1])];
    let gradient = ColumnSource {
        data: dy,
        channels: job.to,
        rows: &same[0],
        cols: &same[1],
    };
    let (rows, depth) = (job.to / job.groups, job.depth());
    let df = SharedSlice::new(df);
    for block in job.cut(T::DTYPE).blocks() {
        let columns = source.columns(call, &block, columns);
        let gradient = gradient.columns(call, &block, gathered);
        // SAFETY: the gradient has `to` rows, the columns `from · taps` rows of one block's
        // columns; each group writes its own rows of the filter's gradient.
        unsafe {
            gemm_batch(call.threads, job.groups, |g| Product {
                m: rows,
                n: depth,
                k: block.columns(),
                a: gradient.rows_from(g * rows),
                b: transposed(columns.rows_from(g * depth)),
                c: MatMut {
                    ptr: df
                        .part(g * rows * depth, (g + 1) * rows * depth)
                        .as_mut_ptr(),
                    row: depth as isize,
                },
                bias: None,
                alpha: 1.0,
                beta: 1.0,
            });
        }
    }
}

/// Images of which columns are laid out.
struct ColumnSource<'a, T> {
    data: &'a [T],
    channels: usize,
    rows: &'a Axis,
    cols: &'a Axis,
}

/// `[channels · taps, columns]`: row r begins at `ptr + r · row`.
#[derive(Clone, Copy)]
struct Columns<T> {
    ptr: *const T,
    row: usize,
}

// SAFETY: a description of memory that outlives the products it is used in, and is only read there.
unsafe impl<T: Sync> Sync for Columns<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Send for Columns<T> {}

impl<T> Columns<T> {
    fn rows_from(&self, first: usize) -> Mat<T> {
        Mat {
            ptr: self.ptr.wrapping_add(first * self.row),
            row: self.row as isize,
            col: 1,
        }
    }
}

fn transposed<T>(mat: Mat<T>) -> Mat<T> {
    Mat {
        ptr: mat.ptr,
        row: mat.col,
        col: mat.row,
    }
}

impl<T: Float> ColumnSource<'_, T> {
    /// The columns of a block: the images themselves where that is the same, else copied to
    /// `buffer`.
    fn columns(&self, call: &Call<'_>, block: &PositionBlock, buffer: &mut [T]) -> Columns<T> {
        let plane = self.rows.size * self.cols.size;
        if self.rows.is_identity() && self.cols.is_identity() && block.images.len() == 1 {
            let first = block.images.start * self.channels * plane + block.positions.start;
            return Columns {
                ptr: self.data[first..].as_ptr(),
                row: plane,
            };
        }
        let width = block.columns();
        let taps: Vec<(Tap, Tap)> = self
            .rows
            .taps
            .iter()
            .flat_map(|r| self.cols.taps.iter().map(|c| (*r, *c)))
            .collect();
        let lines = self.channels * taps.len();
        let out = SharedSlice::new(&mut buffer[..lines * width]);
        call.pieces(lines, (1 << 15) / width.max(1), |start, end| {
            for line in start..end {
                // SAFETY: each line is written by one task.
                let mut rest = unsafe { out.part(line * width, (line + 1) * width) };
                let (channel, tap) = (line / taps.len(), taps[line % taps.len()]);
                for image in block.images.clone() {
                    let here;
                    (here, rest) = rest.split_at_mut(block.positions.len());
                    let first = (image * self.channels + channel) * plane;
                    self.line(
                        &self.data[first..first + plane],
                        tap,
                        block.positions.clone(),
                        here,
                    );
                }
            }
        });
        Columns {
            ptr: buffer.as_ptr(),
            row: width,
        }
    }

    /// What one tap meets at some positions of one plane.
    fn line(
        &self,
        plane: &[T],
        (tap_row, tap_col): (Tap, Tap),
        positions: Range<usize>,
        out: &mut [T],
    ) {
        let valid = self.cols.valid(tap_col);
        let (mut at, mut rest) = (positions.start, out);
        while at < positions.end {
            let (i, start) = (at / self.cols.count, at % self.cols.count);
            let end = (start + positions.end - at).min(self.cols.count);
            let here;
            (here, rest) = rest.split_at_mut(end - start);
            let low = valid.start.clamp(start, end);
            let high = valid.end.clamp(low, end);
            match self.rows.meets(tap_row, i) {
                Some(row) if low < high => {
                    let first = (tap_col.offset + (low * self.cols.step) as isize) as usize;
                    let row = &plane[row * self.cols.size..(row + 1) * self.cols.size];
                    here[..low - start].fill(T::default());
                    take(
                        &row[first..],
                        self.cols.step,
                        &mut here[low - start..high - start],
                    );
                    here[high - start..].fill(T::default());
                }
                _ => here.fill(T::default()),
            }
            at += end - start;
        }
    }
}

/// Every `step`-th element.
#[inline]
fn take<T: Copy>(src: &[T], step: usize, out: &mut [T]) {
    match step {
        1 => out.copy_from_slice(&src[..out.len()]),
        2 => out
            .iter_mut()
            .zip(src.iter().step_by(2))
            .for_each(|(y, x)| *y = *x),
        _ => out
            .iter_mut()
            .zip(src.iter().step_by(step))
            .for_each(|(y, x)| *y = *x),
    }
}
