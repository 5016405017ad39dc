//! Where a program makes its tensors. Every choice follows from the dice and from shapes, never
//! from values.

use roundpipe_tensor::{
    Cx, DType, Error, HostTensor, Param, Result, RngKey, RngSite, Shape, Tensor,
};

/// Dice of one program.
pub struct Dice(RngKey, u64);

impl Dice {
    pub fn new(seed: u64, stream: u32) -> Self {
        Self(
            RngSite {
                seed,
                step: 7,
                layer: stream,
                ..RngSite::default()
            }
            .key(),
            0,
        )
    }

    fn word(&mut self) -> u32 {
        self.1 += 1;
        self.0.word(self.1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.word() as usize % n.max(1)
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A dimension that there is in `rank` of them, counted from either end; rarely one that there
    /// is not.
    pub fn dim(&mut self, rank: usize) -> isize {
        if rank == 0 || self.one_in(40) {
            return self.pick(&[-9, -1, 0, 8, isize::MIN, isize::MAX]);
        }
        let dim = self.below(rank) as isize;
        if self.one_in(2) {
            dim
        } else {
            dim - rank as isize
        }
    }

    /// Sizes of `rank` dimensions that hold at most `budget` elements.
    pub fn dims(&mut self, rank: usize, budget: usize) -> Vec<usize> {
        let mut left = budget.max(1);
        let mut dims = Vec::with_capacity(rank);
        for _ in 0..rank {
            let size = match self.below(24) {
                0 => 0,
                1..4 => 1,
                4..16 => self.pick(&[2, 3, 4, 5, 7, 8, 9]),
                _ => self.pick(&[12, 16, 17, 31, 33, 64, 65, 130, 300, 2000]),
            };
            let size = size.min(left);
            left /= size.max(1);
            dims.push(size);
        }
        let at = self.below(rank);
        if dims.iter().enumerate().any(|(i, d)| i != at && *d == 0) && self.one_in(4) {
            // Without elements, the other sizes take no memory and may be anything.
            dims[at] = self.pick(&[1 << 40, 1 << 55]);
        }
        dims
    }

    pub fn shape(&mut self, budget: usize) -> Vec<usize> {
        let rank = self.pick(&[0, 1, 1, 2, 2, 2, 3, 3, 4, 5]);
        self.dims(rank, budget)
    }
}

/// A tensor whose gradient is wanted.
enum Leaf {
    Input(Tensor),
    Param(Param),
}

/// A context, dice, and what was made so far.
pub struct Bench<'a> {
    pub cx: &'a mut Cx,
    pub dice: Dice,
    /// The float type of this program.
    pub dtype: DType,
    /// Most elements of a new tensor.
    pub budget: usize,
    /// Whether NaN, infinities and the like are among the values.
    pub odd_values: bool,
    /// Whether indices may lie outside.
    pub odd_indices: bool,
    leaves: Vec<Leaf>,
    made: Vec<Tensor>,
}

impl<'a> Bench<'a> {
    pub fn new(cx: &'a mut Cx, dice: Dice, dtype: DType, budget: usize) -> Self {
        let (leaves, made) = (Vec::new(), Vec::new());
        Self {
            cx,
            dice,
            dtype,
            budget,
            odd_values: false,
            odd_indices: false,
            leaves,
            made,
        }
    }

    /// Results are operands of later operations.
    pub fn keep(&mut self, outputs: &[Tensor]) {
        self.made.extend(outputs.iter().cloned());
    }

    /// Numbers in about [-2, 2] that every float type holds.
    fn values(&mut self, count: usize) -> Vec<f64> {
        let odd = [
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            0.0,
            -0.0,
            3e-8,
            -6e4,
            1e30,
            1e-40,
        ];
        let with_odd = self.odd_values;
        let dice = &mut self.dice;
        let value = |_| {
            if with_odd && dice.one_in(20) {
                return dice.pick(&odd);
            }
            let step = (1 + dice.below(32)) as f64 / 16.0;
            if dice.one_in(2) { step } else { -step }
        };
        (0..count).map(value).collect()
    }

    /// A new tensor of the program's type, perhaps with a gradient, in any layout.
    pub fn fresh(&mut self, dims: &[usize]) -> Result<Tensor> {
        let dims = match self.dice.one_in(60) {
            true => self.dice.shape(self.budget),
            false => dims.to_vec(),
        };
        if count(&dims)? > 0 && dims.iter().any(|d| *d > 1) && self.dice.one_in(8) {
            return self.stretched(&dims);
        }
        let (source, order) = self.laid_out(&dims);
        let values = self.values(source.iter().product());
        let host = HostTensor::from_f64s(&values, self.dtype, &source)?;
        let leaf = match self.dice.below(4) {
            0 => self.upload(&host)?,
            1 => {
                let param = Param::new(host.buf().clone(), host.dtype(), host.dims())?;
                let tensor = self.cx.get(&param)?;
                self.leaves.push(Leaf::Param(param));
                tensor
            }
            _ => {
                let tensor = self.upload(&host)?;
                let tensor = self.cx.input(&tensor)?;
                self.leaves.push(Leaf::Input(tensor.clone()));
                tensor
            }
        };
        self.seen_as(&leaf, &order, &dims)
    }

    /// Sizes and order of dimensions of what a tensor of `dims` is a view of.
    fn laid_out(&mut self, dims: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let mut order: Vec<usize> = (0..dims.len()).collect();
        let mut source = dims.to_vec();
        if dims.len() > 1 && self.dice.one_in(3) {
            let (a, b) = (self.dice.below(dims.len()), self.dice.below(dims.len()));
            order.swap(a, b);
            source.swap(a, b);
        }
        if !dims.is_empty() && self.dice.one_in(4) && source.iter().all(|d| *d < 1 << 20) {
            let at = self.dice.below(dims.len());
            source[at] += self.dice.below(3);
        }
        (source, order)
    }

    /// The view of `leaf` that [`Bench::laid_out`] had in mind.
    fn seen_as(&mut self, leaf: &Tensor, order: &[usize], dims: &[usize]) -> Result<Tensor> {
        let mut seen = self.cx.permute(leaf, order)?;
        for (axis, &size) in dims.iter().enumerate() {
            let room = seen.dims()[axis] - size;
            if room > 0 {
                let start = self.dice.below(room + 1);
                seen = self.cx.narrow(&seen, axis as isize, start, size)?;
            }
        }
        Ok(seen)
    }

    /// A tensor with one element along some dimensions, repeated.
    fn stretched(&mut self, dims: &[usize]) -> Result<Tensor> {
        let narrow: Vec<usize> = dims
            .iter()
            .map(|d| if self.dice.one_in(2) { 1 } else { *d })
            .collect();
        let values = self.values(narrow.iter().product());
        let host = HostTensor::from_f64s(&values, self.dtype, &narrow)?;
        let tensor = self.upload(&host)?;
        let tensor = self.cx.input(&tensor)?;
        self.leaves.push(Leaf::Input(tensor.clone()));
        self.cx.broadcast_to(&tensor, dims)
    }

    fn upload(&mut self, host: &HostTensor) -> Result<Tensor> {
        let values = host.to_f64_vec()?;
        self.typed(host.dtype(), &values, host.dims())
    }

    /// A tensor of any type, densely laid out, without a gradient.
    pub fn typed(&mut self, dtype: DType, values: &[f64], dims: &[usize]) -> Result<Tensor> {
        use roundpipe_tensor::{Element, bf16, f16};
        fn of<T: Element>(cx: &mut Cx, values: &[f64], dims: &[usize]) -> Result<Tensor> {
            cx.tensor(
                &values.iter().map(|v| T::from_f64(*v)).collect::<Vec<_>>(),
                dims,
            )
        }
        match dtype {
            DType::F64 => of::<f64>(self.cx, values, dims),
            DType::F32 => of::<f32>(self.cx, values, dims),
            DType::BF16 => of::<bf16>(self.cx, values, dims),
            DType::F16 => of::<f16>(self.cx, values, dims),
            DType::I64 => of::<i64>(self.cx, values, dims),
            DType::I32 => of::<i32>(self.cx, values, dims),
            DType::U32 => of::<u32>(self.cx, values, dims),
            DType::U8 => of::<u8>(self.cx, values, dims),
            _ => self
                .cx
                .tensor_bool(&values.iter().map(|v| *v != 0.0).collect::<Vec<_>>(), dims),
        }
    }

    /// Whole numbers below `size`, one of them outside where the program has such.
    pub fn index(&mut self, dtype: DType, size: usize, dims: &[usize]) -> Result<Tensor> {
        let count = count(dims)?;
        let mut values: Vec<f64> = (0..count).map(|_| self.dice.below(size) as f64).collect();
        if count > 0 && self.odd_indices && self.dice.one_in(4) {
            let at = self.dice.below(count);
            values[at] = self.dice.pick(&[-1.0, -1e9, size as f64, 1e9, 4e18]);
        } else if size == 0 && count > 0 {
            // Nothing to point at: any number is wrong, and only programs with wrong ones have
            // them.
            return self.cx.zeros(dtype, &[0]);
        }
        self.typed(dtype, &values, dims)
    }

    /// A tensor of the program's type and these sizes: one made before, or a new one.
    pub fn float(&mut self, dims: &[usize]) -> Result<Tensor> {
        let fits = |t: &&Tensor| t.dtype() == self.dtype && t.dims() == dims;
        let known: Vec<Tensor> = self.made.iter().filter(fits).cloned().collect();
        match known.is_empty() || self.dice.one_in(3) {
            true => self.fresh(dims),
            false => Ok(known[self.dice.below(known.len())].clone()),
        }
    }

    /// Any tensor of the program's type.
    pub fn any_float(&mut self) -> Result<Tensor> {
        let known: Vec<Tensor> = self
            .made
            .iter()
            .filter(|t| t.dtype() == self.dtype)
            .cloned()
            .collect();
        match known.is_empty() || self.dice.one_in(2) {
            true => {
                let dims = self.dice.shape(self.budget);
                self.fresh(&dims)
            }
            false => Ok(known[self.dice.below(known.len())].clone()),
        }
    }

    /// Any tensor of any type.
    pub fn any(&mut self) -> Result<Tensor> {
        if !self.made.is_empty() && self.dice.one_in(2) {
            return Ok(self.made[self.dice.below(self.made.len())].clone());
        }
        let (dtype, dims) = (self.dice.pick(&DType::ALL), self.dice.shape(self.budget));
        let count = dims.iter().product();
        let whole: Vec<f64> = (0..count)
            .map(|_| self.dice.below(9) as f64 - 2.0)
            .collect();
        self.typed(dtype, &whole, &dims)
    }

    /// Gradients of the leaves, given random ones of some results; none where nothing depends on a
    /// leaf.
    pub fn backward(&mut self) -> Result<Vec<Tensor>> {
        let outputs: Vec<Tensor> = self
            .made
            .iter()
            .filter(|t| t.requires_grad())
            .cloned()
            .collect();
        if outputs.is_empty() {
            return Ok(Vec::new());
        }
        let mut seeds = Vec::new();
        for _ in 0..1 + self.dice.below(3) {
            let output = outputs[self.dice.below(outputs.len())].clone();
            let values = self.values(output.numel());
            let gradient = self.typed(output.dtype(), &values, output.dims())?;
            seeds.push((output, gradient));
        }
        let mut all = self.cx.backward_from(&seeds)?;
        let mut grads = Vec::new();
        for leaf in &self.leaves {
            grads.extend(match leaf {
                Leaf::Input(tensor) => all.take(tensor),
                Leaf::Param(param) => all.take_param(param),
            });
        }
        self.made.clear();
        Ok(grads)
    }
}

/// The number of elements, where a program can have so many.
fn count(dims: &[usize]) -> Result<usize> {
    let count = Shape::new(dims)?.numel();
    if count <= 1 << 20 {
        Ok(count)
    } else {
        Err(Error::invalid("program", format!("no values for {dims:?}")))
    }
}
