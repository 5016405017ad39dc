//! [`tree_struct!`](crate::tree_struct): structs of the user's own as inputs of calls and between
//! layers. The rest of the engine sees trees.

/// Declares a struct that layers and calls take in place of a [`Tree`](crate::Tree): generic over
/// its tensors, which are [`HostTensor`](crate::HostTensor)s where a user gives and gets them, and
/// [`Tensor`](crate::Tensor)s where layers run. Fields are tensors, `bool`, `i64`, `f64`, `String`,
/// `Option`, `Vec` and further types with [`TreeNode`](crate::TreeNode).
///
/// ```
/// use roundpipe::{Cx, HostTensor, Inputs, Layer, ParamVisitor, Params, Tensor, TensorResult, Tree};
/// use roundpipe::{TreeNode, tree_struct};
///
/// tree_struct! {
///     /// A batch of texts.
///     #[derive(Clone)]
///     pub struct Texts<T> {
///         pub ids: T,
///         pub mask: Option<T>,
///         pub temperature: f64,
///     }
/// }
///
/// struct Scale;
/// impl Params for Scale {
///     fn visit(&self, _: &mut ParamVisitor<'_>) {}
/// }
/// impl Layer for Scale {
///     fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
///         let texts = Texts::<Tensor>::from_tree(input)?;
///         let ids = cx.mul_scalar(&texts.ids, texts.temperature)?;
///         Ok(Texts { ids, ..texts }.into_tree())
///     }
/// }
///
/// let ids = HostTensor::from_slice(&[1.0f32, 2.0], &[2])?;
/// let texts = Texts { ids, mask: None, temperature: 0.5 };
/// let inputs = Inputs::new().arg(texts);
/// # Ok::<(), roundpipe::TensorError>(())
/// ```
#[macro_export]
macro_rules! tree_struct {
    (
        $(#[$meta:meta])*
        $visible:vis struct $name:ident<$leaf:ident> {
            $($(#[$field_meta:meta])* $field_visible:vis $field:ident: $type:ty),* $(,)?
        }
    ) => {
        $(#[$meta])*
        $visible struct $name<$leaf> {
            $($(#[$field_meta])* $field_visible $field: $type,)*
        }

        $crate::tree_struct!(@node $name, $leaf, $crate::Tensor, $($field: $type),*);
        $crate::tree_struct!(@node $name, $leaf, $crate::HostTensor, $($field: $type),*);

        impl From<$name<$crate::HostTensor>> for $crate::engine::Input {
            fn from(value: $name<$crate::HostTensor>) -> Self {
                $crate::TreeNode::into_tree(value).into()
            }
        }
    };
    (@node $name:ident, $leaf:ident, $tensor:ty, $($field:ident: $type:ty),*) => {
        const _: () = {
            // The fields' types name the parameter.
            type $leaf = $tensor;

            impl $crate::TreeNode<$tensor> for $name<$tensor> {
                fn into_tree(self) -> $crate::Tree<$tensor> {
                    $crate::Tree::map([$((
                        stringify!($field),
                        <$type as $crate::TreeNode<$leaf>>::into_tree(self.$field),
                    ),)*])
                }

                fn from_tree(tree: $crate::Tree<$tensor>) -> $crate::TensorResult<Self> {
                    let mut fields = $crate::TreeFields::of(stringify!($name), tree)?;
                    let value = Self {
                        $($field: fields.take(stringify!($field))?,)*
                    };
                    fields.end()?;
                    Ok(value)
                }
            }
        };
    };
}

#[cfg(test)]
mod tests {
    use roundpipe_tensor::HostTensor;

    use crate::engine::{Input, Inputs};
    use crate::{Tree, TreeNode};

    crate::tree_struct! {
        #[derive(Clone, Debug)]
        struct Inner<T> {
            rows: Vec<T>,
        }
    }

    crate::tree_struct! {
        #[derive(Clone, Debug)]
        struct Batch<T> {
            ids: T,
            mask: Option<T>,
            inner: Inner<T>,
            count: i64,
            name: String,
        }
    }

    fn tensor(value: f32) -> HostTensor {
        HostTensor::from_slice(&[value], &[1]).unwrap()
    }

    fn batch() -> Batch<HostTensor> {
        Batch {
            ids: tensor(1.0),
            mask: None,
            inner: Inner {
                rows: vec![tensor(2.0), tensor(3.0)],
            },
            count: 7,
            name: "first".into(),
        }
    }

    #[test]
    fn a_struct_goes_into_a_tree_and_back() {
        let tree = batch().into_tree();
        assert_eq!(
            tree.paths("b"),
            ["b.ids", "b.inner.rows[0]", "b.inner.rows[1]"]
        );
        let back = Batch::<HostTensor>::from_tree(tree).unwrap();
        assert_eq!((back.count, back.name.as_str()), (7, "first"));
        assert_eq!(back.inner.rows[1].to_vec::<f32>().unwrap(), [3.0]);
        assert!(back.mask.is_none() && back.ids.to_vec::<f32>().unwrap() == [1.0]);
        let inputs = Inputs::new().arg(batch());
        assert!(matches!(&inputs.args[0], Input::Value(Tree::Map(map)) if map.len() == 5));
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_place() {
        let changed = |key: &str, value: Option<Tree<HostTensor>>| {
            let Tree::Map(mut map) = batch().into_tree() else {
                unreachable!("a struct is a map")
            };
            match value {
                Some(value) => map.insert(key.into(), value),
                None => map.remove(key),
            };
            let error = Batch::<HostTensor>::from_tree(Tree::Map(map)).unwrap_err();
            error.to_string()
        };
        let inner = Tree::map([("rows", Tree::Int(1))]);
        for (text, says) in [
            (
                changed("ids", None),
                "`Batch.ids`: expected one tensor, found nothing",
            ),
            (
                changed("count", Some(Tree::None)),
                "`Batch.count`: expected a whole number",
            ),
            (
                changed("inner", Some(inner)),
                "`Batch.inner`: `Inner.rows`: expected a list",
            ),
            (
                changed("inner", Some(Tree::Bool(true))),
                "expected `Inner`, found a truth value",
            ),
            (
                changed("label", Some(Tree::None)),
                "`Batch` has no field `label`",
            ),
        ] {
            assert!(text.contains(says), "{text}");
        }
    }
}
