//! Elementwise arithmetic.

use crate::bed::{Lie, check, randn};

#[test]
fn four_operations_on_every_lie() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        let inputs =
            [randn(1, &[3, 5, 7]).lying(lie), randn(2, &[3, 5, 7]).map(|x| x.abs() + 0.5).lying(lie)];
        check("add", &inputs, |cx, x| Ok(vec![cx.add(&x[0], &x[1])?]));
        check("sub", &inputs, |cx, x| Ok(vec![cx.sub(&x[0], &x[1])?]));
        check("mul", &inputs, |cx, x| Ok(vec![cx.mul(&x[0], &x[1])?]));
        check("div", &inputs, |cx, x| Ok(vec![cx.div(&x[0], &x[1])?]));
        check("neg", &inputs, |cx, x| Ok(vec![cx.neg(&x[0])?]));
        check("affine", &inputs, |cx, x| Ok(vec![cx.affine(&x[0], -1.5, 0.25)?]));
        check("cat", &inputs, |cx, x| Ok(vec![cx.cat(&[&x[0], &x[1], &x[0]], 1)?]));
    }
}
