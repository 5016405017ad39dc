//! The bf16 kernel for AMX: four tiles of 16 by 16 sums, multiplied 32 steps at a time.
//!
//! A left panel is `[k / 32][32 rows][32 steps]`, a right panel `[k / 2][32 columns][2 steps]`,
//! both with zeros up to the next multiple of 32 steps. Tiles are configured on entry to a series
//! of products and released after it; between the two nothing else on the thread may use tiles.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::bf16;

use super::avx512;
use super::element::{Dest, FewRows, PanelKernel};
use super::pack::Lines;

/// Rows and columns of a panel, and steps of a tile.
const SIDE: usize = 32;

pub(super) static BF16: PanelKernel<bf16> = PanelKernel {
    mr: SIDE,
    nr: SIDE,
    round: SIDE,
    kc: 512,
    unit: 2,
    pack_a,
    pack_b,
    multiply,
    few: Some(FewRows {
        rows: SIDE / 2,
        pack: pack_few,
        multiply: multiply_few,
    }),
    enter,
    leave,
};

/// Whether the machine has AMX for bf16, the system lets this process use it, and it multiplies
/// right.
///
/// The leaves that describe the tiles are not asked: some virtual machines hide them. A product is
/// tried instead.
pub(super) fn works() -> bool {
    present() && permitted() && multiplies()
}

/// Whether the processor has the instructions and the system saves the tiles.
fn present() -> bool {
    let leaf7 = __cpuid_count(7, 0).edx;
    let (bf16, tile) = (leaf7 >> 22 & 1, leaf7 >> 24 & 1);
    let osxsave = __cpuid(1).ecx >> 27 & 1;
    if bf16 & tile & osxsave == 0 {
        return false;
    }
    let enabled: u32;
    // SAFETY: `osxsave` says that xgetbv exists; it only writes eax and edx.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack))
    };
    // Bits 17 and 18: the tile configuration and the tile data.
    enabled >> 17 & 3 == 3
}

/// Asks the system, which gives each process the large register state only on request.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this call takes two numbers and touches no memory of ours.
    unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        ) == 0
    }
}

/// Not known how to ask here.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Tries one product of small whole numbers, which is exact.
fn multiplies() -> bool {
    const K: usize = 2 * SIDE;
    let value = |i: usize, p: usize| ((i * 7 + p * 3) % 11) as f32 - 5.0;
    let numbers: Vec<bf16> = (0..SIDE * K)
        .map(|x| bf16::from_f32(value(x / K, x % K)))
        .collect();
    let lines = Lines {
        ptr: numbers.as_ptr(),
        lane: K as isize,
        step: 1,
        lanes: SIDE,
        k: K,
    };
    let (mut a, mut b) = (vec![bf16::ZERO; SIDE * K], vec![bf16::ZERO; SIDE * K]);
    let mut got = vec![0.0_f32; SIDE * SIDE];
    let row = SIDE as isize;
    let dest = Dest {
        ptr: got.as_mut_ptr(),
        row,
        rows: SIDE,
        cols: SIDE,
        alpha: 1.0,
        add: false,
    };
    // SAFETY: `present` and `permitted` came before; all buffers have the sizes that the kernel
    // states.
    unsafe {
        pack_a(&lines, a.as_mut_ptr().cast());
        pack_b(&lines, b.as_mut_ptr().cast());
        enter();
        multiply(K, a.as_ptr().cast(), b.as_ptr().cast(), &dest);
        leave();
    }
    let want = |i: usize, j: usize| (0..K).map(|p| value(i, p) * value(j, p)).sum::<f32>();
    (0..SIDE * SIDE).all(|x| got[x] == want(x / SIDE, x % SIDE))
}

/// Configures all eight tiles as 16 rows of 64 bytes.
///
/// # Safety
/// The machine has AMX and this process may use it.
unsafe fn enter() {
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut config = Config {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    config.row_bytes[..8].fill(64);
    config.rows[..8].fill(16);
    // SAFETY: the caller vouches for AMX; the instruction reads these 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
}

/// Gives the tiles back.
///
/// # Safety
/// As for [`enter`].
unsafe fn leave() {
    // SAFETY: the caller vouches for AMX.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// # Safety
/// Panels of `k` steps, rounded up, and the destination exist; this thread is between [`enter`] and
/// [`leave`].
#[target_feature(enable = "avx512f")]
unsafe fn multiply(k: usize, a: *const u8, b: *const u8, dest: &Dest<f32>) {
    // SAFETY: the caller's promises.
    unsafe { multiply_with(tiles, k, a, b, dest) }
}

/// Sums go on from what is in the destination: loading tiles is cheaper than adding to memory. With
/// a factor they cannot, and are added afterwards. `tiles` is [`tiles`], or stands for it in tests.
///
/// # Safety
/// As for [`multiply`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn multiply_with(tiles: Tiles, k: usize, a: *const u8, b: *const u8, dest: &Dest<f32>) {
    let mut square = MaybeUninit::<[[f32; SIDE]; SIDE]>::uninit();
    let square = square.as_mut_ptr().cast::<f32>();
    let steps = k.div_ceil(SIDE);
    let plain = dest.alpha == 1.0;
    // SAFETY: the panels hold `steps` blocks; the square and a whole destination hold 32 rows of
    // 32.
    unsafe {
        if plain && dest.rows == SIDE && dest.cols == SIDE {
            return tiles(steps, a, b, dest.ptr, dest.row * 4, dest.add);
        }
        let row = SIDE as isize;
        if plain && dest.add {
            let held = Dest {
                ptr: square,
                row,
                alpha: 1.0,
                add: false,
                ..*dest
            };
            avx512::store(&held, dest.ptr, dest.row);
        }
        tiles(steps, a, b, square, row * 4, plain && dest.add);
        avx512::store(
            &Dest {
                add: dest.add && !plain,
                ..*dest
            },
            square,
            row,
        );
    }
}

/// [`tiles`], or what stands for it.
type Tiles = unsafe fn(usize, *const u8, *const u8, *mut f32, isize, bool);

/// `c = a b`, or `c += a b` if `add`: 32 rows by 32 columns, rows of c `c_row` bytes apart.
///
/// # Safety
/// Both panels hold `steps` blocks of 2048 bytes, c its 32 rows; this thread is between [`enter`]
/// and [`leave`].
unsafe fn tiles(steps: usize, a: *const u8, b: *const u8, c: *mut f32, c_row: isize, add: bool) {
    // SAFETY: each pass reads 2048 bytes of either panel; c is read and written as the caller
    // allows.
    unsafe {
        asm!(
            "test {add:e}, {add:e}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{c} + {c_row}]",
            "tileloadd tmm1, [{c} + {c_row} + 64]",
            "tileloadd tmm2, [{low} + {c_row}]",
            "tileloadd tmm3, [{low} + {c_row} + 64]",
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            "tileloadd tmm6, [{b} + {b_row}]",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tileloadd tmm7, [{b} + {b_row} + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a} + {a_row} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 4b",
            "5:",
            "tilestored [{c} + {c_row}], tmm0",
            "tilestored [{c} + {c_row} + 64], tmm1",
            "tilestored [{low} + {c_row}], tmm2",
            "tilestored [{low} + {c_row} + 64], tmm3",
            add = in(reg) u32::from(add),
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            steps = inout(reg) steps => _,
            a_row = in(reg) 64_usize,
            b_row = in(reg) 128_usize,
            c = in(reg) c,
            low = in(reg) c.wrapping_byte_offset(16 * c_row),
            c_row = in(reg) c_row,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// # Safety
/// The elements of `lines` exist, at most 32 lanes; `dst` holds 64 bytes for each of 32 rows and
/// each 32 steps begun; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_a(lines: &Lines<bf16>, dst: *mut u8) {
    for p in (0..lines.k).step_by(SIDE) {
        for lane in (0..SIDE).step_by(16) {
            // SAFETY: the block lies inside the panel, and the callee reads only what exists.
            unsafe {
                let rows = avx512::bf16_rows(lines, lane, p);
                for (i, &row) in rows.iter().enumerate() {
                    _mm512_storeu_si512(dst.add(p * 2 * SIDE + (lane + i) * 2 * SIDE).cast(), row);
                }
            }
        }
    }
}

/// # Safety
/// As for [`pack_a`], with columns for rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_b(lines: &Lines<bf16>, dst: *mut u8) {
    let (pairs, all) = (lines.k.div_ceil(2), lines.k.next_multiple_of(SIDE) / 2);
    // SAFETY: the caller's promises; both parts lie inside the panel.
    unsafe {
        avx512::pack_pairs::<SIDE>(lines, dst);
        dst.add(pairs * 4 * SIDE)
            .write_bytes(0, (all - pairs) * 4 * SIDE);
    }
}

/// Rows of the left operand as pairs, `[k / 2][16 rows][2 steps]`: the right side of a product whose
/// left side is the columns, read where they lie. A sum of products does not change when their
/// factors do.
///
/// # Safety
/// As for [`pack_a`], with 16 lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn pack_few(lines: &Lines<bf16>, dst: *mut u8) {
    const LANES: usize = SIDE / 2;
    let (pairs, all) = (lines.k.div_ceil(2), lines.k.next_multiple_of(SIDE) / 2);
    // SAFETY: the caller's promises; both parts lie inside the panel, which has room for twice as
    // many rows.
    unsafe {
        avx512::pack_pairs::<LANES>(lines, dst);
        dst.add(pairs * 4 * LANES)
            .write_bytes(0, (all - pairs) * 4 * LANES);
    }
}

/// # Safety
/// Up to 32 columns, rows packed by [`pack_few`] and the destination exist; this thread is between
/// [`enter`] and [`leave`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn multiply_few(lines: &Lines<bf16>, x: *const u8, dest: &Dest<f32>) {
    // SAFETY: the caller's promises.
    unsafe { multiply_few_with(few_tiles, lines, x, dest) }
}

/// As [`multiply_with`]: sums go on from the destination, unless there is a factor.
///
/// # Safety
/// As for [`multiply_few`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn multiply_few_with(tiles: FewTiles, lines: &Lines<bf16>, x: *const u8, dest: &Dest<f32>) {
    const LANES: usize = SIDE / 2;
    let steps = lines.k.div_ceil(SIDE);
    let plain = dest.alpha == 1.0;
    let add = plain && dest.add;
    // [column][row], as the tiles have it.
    let mut sums = [[0.0_f32; LANES]; SIDE];
    if add {
        for i in 0..dest.rows {
            for (j, column) in sums.iter_mut().enumerate().take(dest.cols) {
                // SAFETY: the element is one of the destination's.
                column[i] = unsafe { *dest.ptr.offset(i as isize * dest.row).add(j) };
            }
        }
    }
    let mut copy = Vec::new();
    let whole = lines.lanes == SIDE && lines.k.is_multiple_of(SIDE);
    let columns = if whole {
        Columns {
            ptr: lines.ptr.cast(),
            row: 2 * lines.lane,
            half: 2 * lines.lane * LANES as isize,
            step: 2 * SIDE as isize,
        }
    } else {
        // The edge of the matrix: tiles would read what is not there.
        copy.resize(steps * SIDE * SIDE, bf16::ZERO);
        // SAFETY: the copy has the size of a left panel.
        unsafe { pack_a(lines, copy.as_mut_ptr().cast()) };
        let row = 2 * SIDE as isize;
        Columns {
            ptr: copy.as_ptr().cast(),
            row,
            half: row * LANES as isize,
            step: row * SIDE as isize,
        }
    };
    // SAFETY: all columns have `steps` blocks of 32 steps, and so have the packed rows.
    unsafe { tiles(steps, &columns, x, sums.as_mut_ptr().cast(), add) };
    let mut turned = [[0.0_f32; SIDE]; LANES];
    for (j, column) in sums.iter().enumerate() {
        for (i, row) in turned.iter_mut().enumerate().take(dest.rows) {
            row[j] = column[i];
        }
    }
    let dest = Dest {
        add: dest.add && !plain,
        ..*dest
    };
    // SAFETY: the sums hold 16 rows of 32; the destination has no more.
    unsafe { avx512::store(&dest, turned.as_ptr().cast(), SIDE as isize) };
}

/// 32 columns in memory, bytes apart.
struct Columns {
    ptr: *const u8,
    /// From a column to the next.
    row: isize,
    /// From the first to the 17th.
    half: isize,
    /// From 32 steps to the next 32.
    step: isize,
}

/// [`few_tiles`], or what stands for it.
type FewTiles = unsafe fn(usize, &Columns, *const u8, *mut f32, bool);

/// `c = columns x`, or `c += columns x` if `add`: 32 columns by 16 rows.
///
/// # Safety
/// The columns hold `steps` blocks of 32 steps, x as many of 1024 bytes, c 32 rows of 16; this
/// thread is between [`enter`] and [`leave`].
unsafe fn few_tiles(steps: usize, columns: &Columns, x: *const u8, c: *mut f32, add: bool) {
    // SAFETY: each pass reads 64 bytes of 32 columns and 1024 of x; c is read and written as the
    // caller allows.
    unsafe {
        asm!(
            "test {add:e}, {add:e}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{c} + {line}]",
            "tileloadd tmm1, [{c} + {line} + 1024]",
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            "tileloadd tmm4, [{x} + {line}]",
            "tileloadd tmm5, [{w} + {row}]",
            "tileloadd tmm6, [{low} + {row}]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "add {x}, 1024",
            "add {w}, {step}",
            "add {low}, {step}",
            "dec {steps}",
            "jnz 4b",
            "5:",
            "tilestored [{c} + {line}], tmm0",
            "tilestored [{c} + {line} + 1024], tmm1",
            add = in(reg) u32::from(add),
            x = inout(reg) x => _,
            w = inout(reg) columns.ptr => _,
            low = inout(reg) columns.ptr.wrapping_offset(columns.half) => _,
            row = in(reg) columns.row,
            step = in(reg) columns.step,
            steps = inout(reg) steps => _,
            line = in(reg) 64_usize,
            c = in(reg) c,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// The same kernel with tiles in plain Rust, to test everything around the instructions on any
/// machine with AVX-512.
#[cfg(test)]
pub(super) static IMITATED: PanelKernel<bf16> = {
    #[target_feature(enable = "avx512f")]
    unsafe fn multiply(k: usize, a: *const u8, b: *const u8, dest: &Dest<f32>) {
        // SAFETY: the caller's promises.
        unsafe { multiply_with(imitated_tiles, k, a, b, dest) }
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
    unsafe fn multiply_few(lines: &Lines<bf16>, x: *const u8, dest: &Dest<f32>) {
        // SAFETY: the caller's promises.
        unsafe { multiply_few_with(imitated_few_tiles, lines, x, dest) }
    }
    PanelKernel {
        multiply,
        few: Some(FewRows {
            rows: SIDE / 2,
            pack: pack_few,
            multiply: multiply_few,
        }),
        enter: super::element::nothing,
        leave: super::element::nothing,
        ..BF16
    }
};

/// What the instructions of [`tiles`] do, by the book.
#[cfg(test)]
unsafe fn imitated_tiles(
    steps: usize,
    a: *const u8,
    b: *const u8,
    c: *mut f32,
    c_row: isize,
    add: bool,
) {
    let (a, b) = (a.cast::<bf16>(), b.cast::<bf16>());
    for i in 0..SIDE {
        for j in 0..SIDE {
            // SAFETY: the same elements as the instructions touch.
            unsafe {
                let place = c.wrapping_byte_offset(i as isize * c_row).add(j);
                let mut sum = if add { *place } else { 0.0 };
                for p in 0..steps * SIDE {
                    let x = *a.add(p / SIDE * SIDE * SIDE + i * SIDE + p % SIDE);
                    let y = *b.add((p / 2 * SIDE + j) * 2 + p % 2);
                    sum += x.to_f32() * y.to_f32();
                }
                *place = sum;
            }
        }
    }
}

/// What the instructions of [`few_tiles`] do, by the book.
#[cfg(test)]
unsafe fn imitated_few_tiles(
    steps: usize,
    columns: &Columns,
    x: *const u8,
    c: *mut f32,
    add: bool,
) {
    const LANES: usize = SIDE / 2;
    for j in 0..SIDE {
        for i in 0..LANES {
            // SAFETY: the same elements as the instructions touch.
            unsafe {
                let place = c.add(j * LANES + i);
                let mut sum = if add { *place } else { 0.0 };
                for p in 0..steps * SIDE {
                    let block = (p / SIDE) as isize * columns.step;
                    let column = columns.ptr.offset(block + j as isize * columns.row);
                    let w = *column.cast::<bf16>().add(p % SIDE);
                    let y = *x.cast::<bf16>().add((p / 2 * LANES + i) * 2 + p % 2);
                    sum += w.to_f32() * y.to_f32();
                }
                *place = sum;
            }
        }
    }
}
