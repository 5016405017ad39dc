//! Views: reshape, permute, narrow, broadcast.

use crate::bed::{check, randn};

#[test]
fn views_and_their_gradients() {
    check("reshape", &[randn(1, &[3, 4, 5])], |cx, x| Ok(vec![cx.reshape(&x[0], &[5, -1])?]));
    check("permute then reshape", &[randn(2, &[3, 4, 5])], |cx, x| {
        let y = cx.permute(&x[0], &[2, 0, 1])?;
        Ok(vec![cx.reshape(&y, &[-1, 2])?])
    });
    check("narrow", &[randn(3, &[3, 7])], |cx, x| {
        Ok(vec![cx.narrow(&x[0], -1, 2, 3)?, cx.narrow(&x[0], 0, 1, 1)?])
    });
    check("broadcast_to", &[randn(4, &[3, 1])], |cx, x| Ok(vec![cx.broadcast_to(&x[0], &[2, 3, 5])?]));
    check("empty", &[randn(5, &[0, 4])], |cx, x| Ok(vec![cx.reshape(&x[0], &[2, 0])?]));
}
