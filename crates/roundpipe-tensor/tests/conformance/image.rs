//! Convolution and pooling.

use roundpipe_tensor::kernel::{ConvSpec, PoolSpec};
use roundpipe_tensor::ops::BatchNorm;
use roundpipe_tensor::{Cx, DType, Param, Result, Tensor};

use crate::bed::{
    Lie, Strict, check, check_with, close, noise, randn, run, upload, values, worker,
};
use crate::golden;

const PLAIN: ConvSpec = ConvSpec {
    stride: [1, 1],
    padding: [0, 0],
    dilation: [1, 1],
    groups: 1,
};

/// Input, filter, geometry: every path (columns, the images themselves, depthwise), odd sizes, lost
/// edges, windows wider than the image, more images than fit one block.
fn convolutions() -> Vec<(&'static str, [usize; 4], [usize; 4], ConvSpec)> {
    let padded = ConvSpec {
        padding: [1, 1],
        ..PLAIN
    };
    let two = ConvSpec {
        stride: [2, 2],
        ..padded
    };
    let oblong = ConvSpec {
        stride: [2, 1],
        padding: [1, 2],
        dilation: [1, 2],
        groups: 1,
    };
    let sparse = ConvSpec {
        stride: [3, 3],
        ..PLAIN
    };
    vec![
        ("plain", [2, 3, 6, 7], [4, 3, 3, 3], PLAIN),
        ("padded", [2, 3, 5, 4], [5, 3, 3, 3], padded),
        ("1x1", [2, 3, 5, 4], [6, 3, 1, 1], PLAIN),
        ("1x1 of one image", [1, 5, 3, 7], [2, 5, 1, 1], PLAIN),
        ("1x1 with stride", [2, 3, 5, 6], [4, 3, 1, 1], sparse),
        ("stride", [2, 3, 8, 7], [4, 3, 3, 3], two),
        ("lost edge", [1, 2, 8, 8], [3, 2, 3, 3], sparse),
        (
            "dilation",
            [1, 3, 9, 8],
            [4, 3, 3, 3],
            ConvSpec {
                padding: [2, 2],
                dilation: [2, 2],
                ..PLAIN
            },
        ),
        (
            "groups",
            [2, 6, 5, 6],
            [4, 3, 3, 3],
            ConvSpec {
                groups: 2,
                ..padded
            },
        ),
        ("oblong", [1, 2, 7, 9], [3, 2, 2, 5], oblong),
        ("one element", [1, 2, 1, 1], [1, 2, 3, 3], padded),
        (
            "wide border",
            [1, 2, 2, 3],
            [2, 2, 2, 2],
            ConvSpec {
                padding: [3, 2],
                ..PLAIN
            },
        ),
        ("no image", [0, 2, 4, 4], [3, 2, 3, 3], PLAIN),
        ("no output channel", [2, 2, 4, 4], [0, 2, 3, 3], PLAIN),
        (
            "depthwise",
            [2, 5, 6, 5],
            [5, 1, 3, 3],
            ConvSpec {
                groups: 5,
                ..padded
            },
        ),
        (
            "depthwise twice",
            [2, 3, 6, 5],
            [6, 1, 3, 3],
            ConvSpec { groups: 3, ..two },
        ),
        (
            "depthwise oblong",
            [1, 2, 7, 19],
            [4, 1, 2, 5],
            ConvSpec {
                groups: 2,
                ..oblong
            },
        ),
        (
            "depthwise wide",
            [1, 1, 2, 300],
            [1, 1, 1, 3],
            ConvSpec {
                padding: [0, 1],
                ..PLAIN
            },
        ),
        ("one channel", [3, 1, 6, 6], [4, 1, 3, 3], padded),
    ]
}

#[test]
fn convolutions_have_their_gradients() {
    for (name, x, f, spec) in convolutions() {
        let inputs = [randn(1, &x), randn(2, &f), randn(3, &f[..1])];
        check(name, &inputs, |cx, x| {
            Ok(vec![cx.conv2d(&x[0], &x[1], Some(&x[2]), spec)?])
        });
        check(name, &inputs[..2], |cx, x| {
            Ok(vec![cx.conv2d(&x[0], &x[1], None, spec)?])
        });
    }
}

/// Differences say nothing about values: those are compared with the definition.
#[test]
fn convolutions_are_the_sum_over_taps() {
    let mut cases = convolutions();
    // Several blocks of positions of one image, several images per block, several blocks of images.
    let padded = ConvSpec {
        padding: [1, 1],
        ..PLAIN
    };
    cases.push(("large", [1, 2, 61, 70], [3, 2, 3, 3], padded));
    cases.push((
        "many small",
        [70, 2, 6, 7],
        [3, 2, 3, 3],
        ConvSpec {
            stride: [1, 2],
            ..padded
        },
    ));
    cases.push(("many small 1x1", [70, 3, 6, 7], [3, 3, 1, 1], PLAIN));
    for (name, x, f, spec) in cases {
        let inputs = [randn(1, &x), randn(2, &f)];
        let conv = |cx: &mut Cx, x: &[Tensor]| Ok(vec![cx.conv2d(&x[0], &x[1], None, spec)?]);
        let have = run(&worker(2), &inputs, DType::F64, &conv, true).unwrap();
        let (data, taps) = (noise(1, x.iter().product()), noise(2, f.iter().product()));
        let dy = noise(900, have.outputs[0].len());
        let [y, dx, df] = convolve(&data, x, &taps, f, &dy, spec);
        close(name, &have.outputs, &[y], 1e-12);
        close(name, &have.grads, &[dx, df], 1e-12);
    }
}

/// The definition: output, and gradients given that of the output.
fn convolve(
    x: &[f64],
    xs: [usize; 4],
    f: &[f64],
    fs: [usize; 4],
    dy: &[f64],
    spec: ConvSpec,
) -> [Vec<f64>; 3] {
    let size = |a: usize| {
        (xs[2 + a] + 2 * spec.padding[a] - spec.dilation[a] * (fs[2 + a] - 1) - 1) / spec.stride[a]
            + 1
    };
    let (height, width) = (size(0), size(1));
    let mut y = vec![0.0; xs[0] * fs[0] * height * width];
    let (mut dx, mut df) = (vec![0.0; x.len()], vec![0.0; f.len()]);
    for at in 0..y.len() {
        let (n, o, i, j) = (
            at / width / height / fs[0],
            at / width / height % fs[0],
            at / width % height,
            at % width,
        );
        for tap in 0..fs[1] * fs[2] * fs[3] {
            let (c, k, l) = (tap / fs[3] / fs[2], tap / fs[3] % fs[2], tap % fs[3]);
            let row = (i * spec.stride[0] + k * spec.dilation[0]).wrapping_sub(spec.padding[0]);
            let col = (j * spec.stride[1] + l * spec.dilation[1]).wrapping_sub(spec.padding[1]);
            if row < xs[2] && col < xs[3] {
                let channel = o / (fs[0] / spec.groups) * fs[1] + c;
                let from = ((n * xs[1] + channel) * xs[2] + row) * xs[3] + col;
                let tap = o * fs[1] * fs[2] * fs[3] + tap;
                y[at] += x[from] * f[tap];
                dx[from] += dy[at] * f[tap];
                df[tap] += dy[at] * x[from];
            }
        }
    }
    [y, dx, df]
}

/// A transposed convolution is the gradient of the one it transposes, and the other way round, for
/// every size that leads back.
#[test]
fn transposed_convolutions_are_gradients_of_convolutions() {
    for (name, x, f, spec) in convolutions() {
        let size = |a: usize| {
            let room = x[2 + a] + 2 * spec.padding[a] - spec.dilation[a] * (f[2 + a] - 1) - 1;
            (room / spec.stride[a] + 1, room % spec.stride[a])
        };
        let ((height, lost_rows), (width, lost_columns)) = (size(0), size(1));
        let small = [x[0], f[0], height, width];
        let inputs = [randn(900, &small), randn(2, &f)];
        let transposed = |cx: &mut Cx, t: &[Tensor]| {
            let lost = [lost_rows, lost_columns];
            Ok(vec![cx.conv_transpose2d(&t[0], &t[1], None, spec, lost)?])
        };
        let have = run(&worker(2), &inputs, DType::F64, &transposed, true).unwrap();
        let taps = noise(2, f.iter().product());
        let dy = noise(900, small.iter().product());
        // By the definition of the convolution: of zeros, only the gradient of the input matters.
        let zeros = vec![0.0; x.iter().product()];
        let [_, want, _] = convolve(&zeros, x, &taps, f, &dy, spec);
        close(name, &have.outputs, &[want], 1e-12);
        let inputs = [randn(1, &small), randn(2, &f), randn(3, &[x[1]])];
        check(name, &inputs, |cx, t| {
            let lost = [lost_rows, lost_columns];
            let bias = Some(&t[2]);
            Ok(vec![cx.conv_transpose2d(&t[0], &t[1], bias, spec, lost)?])
        });
    }
}

#[test]
fn transposed_convolutions_that_cannot_be_are_refused() {
    let worker = worker(1);
    let mut cx = Cx::infer(&worker);
    let x = cx.zeros(DType::F32, &[1, 4, 3, 3]).unwrap();
    let f = cx.zeros(DType::F32, &[4, 2, 3, 3]).unwrap();
    let mut text = |x: &Tensor, spec: ConvSpec, more: [usize; 2]| {
        let refused = cx.conv_transpose2d(x, &f, None, spec, more);
        refused.unwrap_err().to_string()
    };
    let found = text(&x, PLAIN, [1, 0]);
    assert!(
        found.contains("output_padding 1 must be less than the stride 1"),
        "{found}"
    );
    let found = text(&f, PLAIN, [0, 0]);
    assert!(found.contains("[4, 2, 3, 3] has 2 channels"), "{found}");
    let wide = ConvSpec {
        padding: [3, 3],
        ..PLAIN
    };
    let found = text(&x, wide, [0, 0]);
    assert!(found.contains("has no size that can be written"), "{found}");
    let found = text(&x, ConvSpec { groups: 3, ..PLAIN }, [0, 0]);
    assert!(found.contains("3 groups do not divide"), "{found}");
}

#[test]
fn convolutions_take_any_lie() {
    for lie in [Lie::Transposed, Lie::CutOut] {
        let inputs = [
            randn(1, &[2, 4, 5, 6]).lying(lie),
            randn(2, &[4, 2, 3, 3]).lying(lie),
        ];
        let spec = ConvSpec {
            groups: 2,
            padding: [1, 0],
            ..PLAIN
        };
        check("conv2d", &inputs, |cx, x| {
            Ok(vec![cx.conv2d(&x[0], &x[1], None, spec)?])
        });
    }
    let inputs = [randn(1, &[2, 4, 11]), randn(2, &[6, 4, 3]), randn(3, &[6])];
    let spec = ConvSpec {
        stride: [7, 2],
        padding: [9, 1],
        ..PLAIN
    };
    check("conv1d", &inputs, |cx, x| {
        Ok(vec![cx.conv1d(&x[0], &x[1], Some(&x[2]), spec)?])
    });
}

/// Gradients that are not wanted are not computed, and those that are wanted do not need the
/// others.
#[test]
fn frozen_operands_change_nothing() {
    let conv = |cx: &mut Cx, x: &[Tensor]| {
        Ok(vec![cx.conv2d(
            &x[0],
            &x[1],
            Some(&x[2]),
            ConvSpec {
                padding: [1, 1],
                ..PLAIN
            },
        )?])
    };
    let inputs = [
        randn(1, &[2, 3, 5, 5]),
        randn(2, &[4, 3, 3, 3]),
        randn(3, &[4]),
    ];
    let all = run(&worker(1), &inputs, DType::F32, &conv, true).unwrap();
    for wanted in 0..3 {
        let some: Vec<_> = inputs
            .iter()
            .enumerate()
            .map(|(i, x)| {
                if i == wanted {
                    x.clone()
                } else {
                    x.clone().constant()
                }
            })
            .collect();
        let one = run(&worker(1), &some, DType::F32, &conv, true).unwrap();
        assert_eq!(
            one.grads,
            [all.grads[wanted].clone()],
            "only input {wanted}"
        );
    }
}

fn poolings() -> Vec<(&'static str, [usize; 4], PoolSpec)> {
    let three = PoolSpec {
        stride: [2, 2],
        padding: [1, 1],
        ..PoolSpec::window([3, 3])
    };
    let oblong = PoolSpec {
        stride: [1, 2],
        padding: [0, 1],
        ..PoolSpec::window([2, 3])
    };
    vec![
        ("side by side", [2, 3, 6, 8], PoolSpec::window([2, 2])),
        (
            "overlapping",
            [2, 3, 7, 8],
            PoolSpec {
                stride: [1, 1],
                ..PoolSpec::window([3, 3])
            },
        ),
        ("padded", [2, 3, 7, 8], three),
        ("oblong", [1, 2, 5, 9], oblong),
        (
            "ceil",
            [1, 2, 7, 8],
            PoolSpec {
                ceil_mode: true,
                ..three
            },
        ),
        (
            "ceil without border",
            [2, 1, 8, 6],
            PoolSpec {
                ceil_mode: true,
                padding: [0, 0],
                ..three
            },
        ),
        (
            "border not counted",
            [1, 2, 5, 5],
            PoolSpec {
                count_include_pad: false,
                ..three
            },
        ),
        ("one element", [1, 1, 1, 1], PoolSpec::window([1, 1])),
        ("no image", [0, 2, 4, 4], three),
        ("no channel", [2, 0, 4, 4], three),
        ("several bands", [1, 1, 70, 90], three),
        ("long rows", [1, 1, 2, 600], PoolSpec::window([2, 2])),
    ]
}

#[test]
fn poolings_have_their_gradients() {
    for (name, dims, spec) in poolings() {
        // Different values everywhere: at a tie the maximum has no derivative. The narrow types
        // cannot hold so many different ones.
        let count: usize = dims.iter().product();
        let apart: Vec<f64> = (0..count)
            .map(|i| (i * 179 % count) as f64 / 64.0 - 1.0)
            .collect();
        let dtypes = if count > 2000 {
            &[DType::F32]
        } else {
            Strict::default().dtypes
        };
        let strict = Strict {
            dtypes,
            ..Strict::default()
        };
        check_with(name, &[values(&apart, &dims)], strict, |cx, x| {
            Ok(vec![cx.max_pool2d(&x[0], spec)?])
        });
        check(name, &[randn(1, &dims)], |cx, x| {
            Ok(vec![cx.avg_pool2d(&x[0], spec)?])
        });
    }
    let dilated = PoolSpec {
        stride: [1, 1],
        dilation: [2, 3],
        padding: [1, 0],
        ..PoolSpec::window([2, 2])
    };
    let apart: Vec<f64> = (0..80)
        .map(|i| f64::from(i * 37 % 80) / 32.0 - 1.0)
        .collect();
    check("dilated", &[values(&apart, &[2, 1, 5, 8])], |cx, x| {
        Ok(vec![cx.max_pool2d(&x[0], dilated)?])
    });
    for lie in [Lie::Transposed, Lie::CutOut] {
        let input = values(&apart, &[2, 1, 5, 8]).lying(lie);
        let spec = PoolSpec::window([2, 3]);
        check("lying", &[input], |cx, x| {
            Ok(vec![
                cx.max_pool2d(&x[0], spec)?,
                cx.avg_pool2d(&x[0], spec)?,
                cx.global_avg_pool2d(&x[0])?,
            ])
        });
    }
    for (dims, size) in [
        ([2, 3, 7, 7], [3, 3]),
        ([1, 2, 7, 8], [3, 5]),
        ([2, 2, 3, 40], [1, 1]),
        ([1, 1, 2, 3], [5, 4]),
    ] {
        let inputs = [randn(5, &dims)];
        check("adaptive", &inputs, |cx, x| {
            Ok(vec![cx.adaptive_avg_pool2d(&x[0], size)?])
        });
    }
}

/// Values by hand: the border never wins, the first of equals gets the gradient, NaN wins.
#[test]
fn maxima_of_special_values() {
    let pool = |values: &[f32], dims: &[usize], spec: PoolSpec| -> Result<(Vec<f32>, Vec<f32>)> {
        let mut cx = Cx::train(&worker(1));
        let x = cx.tensor(values, dims)?;
        let x = cx.input(&x)?;
        let y = cx.max_pool2d(&x, spec)?;
        let ones = upload(&mut cx, &vec![1.0; y.numel()], y.dims(), DType::F32)?;
        let grads = cx.backward_from(&[(y.clone(), ones)])?;
        Ok((y.to_vec()?, grads.of(&x).unwrap().to_vec()?))
    };
    let whole = PoolSpec {
        padding: [1, 1],
        ..PoolSpec::window([3, 3])
    };
    let (y, dx) = pool(&[-3.0, -2.0, -2.0, -5.0], &[1, 1, 2, 2], whole).unwrap();
    assert_eq!(
        (y, dx),
        (vec![-2.0], vec![0.0, 1.0, 0.0, 0.0]),
        "zeros of the border do not win"
    );
    let (y, dx) = pool(&[f32::NEG_INFINITY; 4], &[1, 1, 2, 2], whole).unwrap();
    assert_eq!((y, dx), (vec![f32::NEG_INFINITY], vec![1.0, 0.0, 0.0, 0.0]));
    let (y, dx) = pool(&[1.0, f32::NAN, f32::NAN, 9.0], &[1, 1, 2, 2], whole).unwrap();
    assert!(y[0].is_nan());
    assert_eq!(dx, [0.0, 1.0, 0.0, 0.0], "the first NaN");
    let beside = PoolSpec {
        kernel: [2, 2],
        dilation: [2, 2],
        stride: [1, 1],
        ..whole
    };
    let (y, dx) = pool(&[7.0], &[1, 1, 1, 1], beside).unwrap();
    assert_eq!(
        (y, dx),
        (vec![f32::NEG_INFINITY], vec![0.0]),
        "a window that steps over the only element"
    );
}

#[test]
fn geometry_that_cannot_work_is_named() {
    let mut cx = Cx::infer(&worker(1));
    let x = cx.zeros(DType::F32, &[2, 6, 5, 4]).unwrap();
    let f = cx.zeros(DType::F32, &[4, 6, 3, 3]).unwrap();
    let mut conv = |spec: ConvSpec| cx.conv2d(&x, &f, None, spec).unwrap_err().to_string();
    let text = conv(ConvSpec {
        dilation: [3, 1],
        ..PLAIN
    });
    assert!(
        text.contains("window of 7") && text.contains("[2, 6, 5, 4]"),
        "{text}"
    );
    let text = conv(ConvSpec {
        stride: [1, 0],
        ..PLAIN
    });
    assert!(text.contains("stride 0"), "{text}");
    let text = conv(ConvSpec { groups: 4, ..PLAIN });
    assert!(
        text.contains("4 groups") && text.contains("[4, 6, 3, 3]"),
        "{text}"
    );
    let text = conv(ConvSpec { groups: 2, ..PLAIN });
    assert!(
        text.contains("3 channels each") && text.contains("wants 6"),
        "{text}"
    );
    let text = conv(ConvSpec { groups: 0, ..PLAIN });
    assert!(text.contains("0 groups"), "{text}");
    assert!(
        conv(ConvSpec {
            padding: [usize::MAX, 0],
            ..PLAIN
        })
        .contains("window")
    );
    assert!(
        conv(ConvSpec {
            dilation: [usize::MAX, 1],
            ..PLAIN
        })
        .contains("window")
    );

    let wrong = cx.zeros(DType::F32, &[5]).unwrap();
    let text = cx
        .conv2d(&x, &f, Some(&wrong), PLAIN)
        .unwrap_err()
        .to_string();
    assert!(text.contains("[5]") && text.contains("[4]"), "{text}");
    let other = cx.zeros(DType::BF16, &[4, 6, 3, 3]).unwrap();
    assert!(
        cx.conv2d(&x, &other, None, PLAIN)
            .unwrap_err()
            .to_string()
            .contains("bf16")
    );
    let flat = cx.zeros(DType::F32, &[6, 5, 4]).unwrap();
    assert!(
        cx.conv2d(&flat, &f, None, PLAIN)
            .unwrap_err()
            .to_string()
            .contains("[6, 5, 4]")
    );
    assert!(
        cx.max_pool2d(&flat, PoolSpec::window([2, 2]))
            .unwrap_err()
            .to_string()
            .contains("[n, c, h, w]")
    );
    let wide = PoolSpec {
        padding: [2, 0],
        ..PoolSpec::window([3, 3])
    };
    assert!(
        cx.max_pool2d(&x, wide)
            .unwrap_err()
            .to_string()
            .contains("half the window")
    );
    let zero = PoolSpec::window([0, 2]);
    assert!(
        cx.avg_pool2d(&x, zero)
            .unwrap_err()
            .to_string()
            .contains("must not be 0")
    );
    let dilated = PoolSpec {
        dilation: [2, 1],
        ..PoolSpec::window([2, 2])
    };
    assert!(
        cx.avg_pool2d(&x, dilated)
            .unwrap_err()
            .to_string()
            .contains("dilation")
    );
    let whole = cx.zeros(DType::I64, &[1, 1, 2, 2]).unwrap();
    assert!(
        cx.max_pool2d(&whole, PoolSpec::window([2, 2]))
            .unwrap_err()
            .to_string()
            .contains("i64")
    );
    let empty = cx.zeros(DType::F32, &[1, 1, 0, 2]).unwrap();
    assert!(
        cx.global_avg_pool2d(&empty)
            .unwrap_err()
            .to_string()
            .contains("empty")
    );
}

/// A pair or a single number of a case's geometry.
const fn both(n: usize) -> [usize; 2] {
    [n, n]
}

#[test]
fn operations_agree_with_pytorch() {
    let file = golden::open("general_ops");
    let strided = ConvSpec {
        stride: both(2),
        padding: both(1),
        ..PLAIN
    };
    let oblong = ConvSpec {
        stride: [2, 1],
        padding: [1, 2],
        dilation: [1, 2],
        groups: 1,
    };
    for (name, spec) in [
        ("plain", PLAIN),
        ("1x1", PLAIN),
        ("stride", strided),
        (
            "stride_lost_edge",
            ConvSpec {
                stride: both(3),
                ..PLAIN
            },
        ),
        (
            "dilation",
            ConvSpec {
                padding: both(2),
                dilation: both(2),
                ..PLAIN
            },
        ),
        (
            "groups",
            ConvSpec {
                padding: both(1),
                groups: 2,
                ..PLAIN
            },
        ),
        (
            "depthwise",
            ConvSpec {
                padding: both(1),
                groups: 5,
                ..PLAIN
            },
        ),
        (
            "depthwise_twice",
            ConvSpec {
                groups: 3,
                ..strided
            },
        ),
        ("oblong", oblong),
    ] {
        file.case(&format!("conv2d_{name}"))
            .check(|cx, t| cx.conv2d(t.of("in.x"), t.of("in.weight"), t.get("in.bias"), spec));
    }
    let three = PoolSpec {
        stride: both(2),
        ..PoolSpec::window(both(3))
    };
    let padded = PoolSpec {
        padding: both(1),
        ..three
    };
    let ceil = PoolSpec {
        ceil_mode: true,
        ..three
    };
    let flat = PoolSpec {
        stride: [1, 2],
        ..PoolSpec::window([2, 3])
    };
    let dilated = PoolSpec {
        stride: both(1),
        dilation: both(2),
        ..PoolSpec::window(both(2))
    };
    for (name, spec) in [
        ("max_pool", PoolSpec::window(both(2))),
        ("max_pool_padding", padded),
        (
            "max_pool_overlap",
            PoolSpec {
                stride: both(1),
                ..three
            },
        ),
        (
            "max_pool_oblong",
            PoolSpec {
                padding: [0, 1],
                ..flat
            },
        ),
        ("max_pool_dilation", dilated),
        ("max_pool_ceil", ceil),
    ] {
        file.case(name)
            .check(|cx, t| cx.max_pool2d(t.of("in.x"), spec));
    }
    for (name, spec) in [
        ("avg_pool", PoolSpec::window(both(2))),
        ("avg_pool_padding", padded),
        (
            "avg_pool_no_pad_count",
            PoolSpec {
                count_include_pad: false,
                ..padded
            },
        ),
        (
            "avg_pool_oblong",
            PoolSpec {
                padding: [1, 0],
                ..flat
            },
        ),
        ("avg_pool_ceil", ceil),
    ] {
        file.case(name)
            .check(|cx, t| cx.avg_pool2d(t.of("in.x"), spec));
    }
    for (name, size) in [("7_to_3", both(3)), ("oblong", [3, 5]), ("to_1", both(1))] {
        file.case(&format!("adaptive_avg_{name}"))
            .check(|cx, t| cx.adaptive_avg_pool2d(t.of("in.x"), size));
    }
}

/// Running statistics as buffers of a type.
fn running(case: &golden::Case, dtype: DType) -> [Param; 2] {
    ["buf.bn1.running_mean", "buf.bn1.running_var"].map(|name| {
        let (values, dims) = case.f64(name);
        match dtype {
            DType::F64 => Param::from_slice(&values, &dims),
            _ => Param::from_slice(&values.iter().map(|v| *v as f32).collect::<Vec<_>>(), &dims),
        }
        .unwrap()
        .frozen()
    })
}

fn conv_block(cx: &mut Cx, t: &golden::Inputs, [mean, var]: &[Param; 2]) -> Result<Tensor> {
    let x = t.of("in.x");
    let y = cx.conv2d(
        x,
        t.of("p.conv1.weight"),
        None,
        ConvSpec {
            stride: both(2),
            padding: both(1),
            ..PLAIN
        },
    )?;
    let options = BatchNorm {
        eps: 1e-5,
        momentum: 0.1,
    };
    let (weight, bias) = (t.of("p.bn1.weight"), t.of("p.bn1.bias"));
    let y = cx.batch_norm(&y, Some(weight), Some(bias), Some((mean, var)), options)?;
    let y = cx.relu(&y)?;
    let short = cx.conv2d(
        x,
        t.of("p.shortcut.weight"),
        None,
        ConvSpec {
            stride: both(2),
            ..PLAIN
        },
    )?;
    let y = cx.add(&y, &short)?;
    let dilated = ConvSpec {
        padding: both(2),
        dilation: both(2),
        groups: 4,
        ..PLAIN
    };
    let y = cx.conv2d(
        &y,
        t.of("p.dilated.weight"),
        Some(t.of("p.dilated.bias")),
        dilated,
    )?;
    let depthwise = ConvSpec {
        padding: both(1),
        groups: 12,
        ..PLAIN
    };
    let y = cx.conv2d(&y, t.of("p.depthwise.weight"), None, depthwise)?;
    let y = cx.max_pool2d(
        &y,
        PoolSpec {
            stride: both(2),
            padding: both(1),
            ..PoolSpec::window(both(3))
        },
    )?;
    let y = cx.avg_pool2d(
        &y,
        PoolSpec {
            stride: both(1),
            ..PoolSpec::window(both(2))
        },
    )?;
    let y = cx.global_avg_pool2d(&y)?;
    let y = cx.flatten(&y, 1, -1)?;
    cx.linear(&y, t.of("p.fc.weight"), Some(t.of("p.fc.bias")))
}

/// Forward, all gradients, the running statistics after the step, and the output with them.
#[test]
fn a_block_agrees_with_pytorch() {
    let case = golden::open("conv_block").case("");
    for (dtype, limit) in [(DType::F64, 1e-7), (DType::F32, 4e-6)] {
        case.check_in(dtype, limit, &|cx, t| {
            conv_block(cx, t, &running(&case, dtype))
        });
    }
    // A forward for its statistics alone, then one in evaluation.
    let buffers = running(&case, DType::F64);
    for (training, want) in [(true, "out"), (false, "eval.out")] {
        let mut cx = Cx::new(&worker(1), false, training);
        let inputs = case.inputs(&mut cx, DType::F64);
        let y = conv_block(&mut cx, &inputs, &buffers).unwrap();
        close(want, &[y.to_f64_vec().unwrap()], &[case.f64(want).0], 1e-7);
        cx.commit_buffers().unwrap();
    }
    for (buffer, name) in buffers
        .iter()
        .zip(["after.bn1.running_mean", "after.bn1.running_var"])
    {
        close(name, &[buffer.to_vec().unwrap()], &[case.f64(name).0], 1e-7);
    }
}
