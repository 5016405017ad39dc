//! cuDNN's graph API, as much of it as attention needs: a graph of products, sums and functions of
//! elements is described, and the library makes one plan of the whole.
//!
//! The order is the library's: tensors, operations, the graph, what its heuristics propose, a plan,
//! and per call the addresses. Every refusal is a text that explains why another
//! implementation runs; none of them is an error for the user.
//!
//! # Invariants
//! - Descriptors live as long as the plan that was made of them.
//! - Where the library was not found ([`library::cudnn`]) everything is refused.

use std::ffi::c_void;

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind,
};
pub(super) use cudarc::cudnn::sys::{
    cudaStream_t as Stream, cudnnDataType_t as Data, cudnnPointwiseMode_t as Function,
    cudnnReduceTensorOp_t as Sum,
};

use crate::cuda::library::{self, Cudnn, Loaded, Status};

/// Why the library did not want to.
pub(super) type Refused = String;

fn api() -> Result<&'static Loaded<Cudnn>, Refused> {
    library::cudnn().map_err(|why| why.to_string())
}

/// A refusal: what was wanted, and the library's words.
fn said(api: &Cudnn, what: &str, status: Status) -> Result<(), Refused> {
    status
        .result()
        .map_err(|status| format!("{what}: {}", api.text(status)))
}

/// The library's state for one stream.
pub(super) struct CudnnHandle(sys::cudnnHandle_t, &'static Cudnn);

// SAFETY: a handle may be used from any thread, by one at a time: its owner keeps it behind a lock.
unsafe impl Send for CudnnHandle {}

impl CudnnHandle {
    /// A handle that queues on `stream`, in the current context.
    pub fn new(stream: Stream) -> Result<Self, Refused> {
        let mut raw = std::ptr::null_mut();
        let api = api()?;
        // SAFETY: written by the call; a context is current.
        said(api, "cudnnCreate", unsafe { api.cudnnCreate(&mut raw) })?;
        let handle = Self(raw, api);
        handle.queue_on(stream)?;
        Ok(handle)
    }

    /// For parts of the library that are not graphs.
    pub fn raw(&self) -> sys::cudnnHandle_t {
        self.0
    }

    /// Queues on another stream from now on.
    pub fn queue_on(&self, stream: Stream) -> Result<(), Refused> {
        // SAFETY: both are alive.
        said(self.1, "cudnnSetStream", unsafe {
            self.1.cudnnSetStream(self.0, stream)
        })
    }
}

impl Drop for CudnnHandle {
    fn drop(&mut self) {
        // Its stream may be gone already.
        let _ = self.queue_on(std::ptr::null_mut());
        // SAFETY: made in `new`, destroyed once, while its context is alive.
        let _ = unsafe { self.1.cudnnDestroy(self.0) };
    }
}

/// One of the library's descriptors.
struct Descriptor(sys::cudnnBackendDescriptor_t, &'static Cudnn);

// SAFETY: finished descriptors are only read; unfinished ones stay with their maker.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the library, destroyed once.
        let _ = unsafe { self.1.cudnnBackendDestroyDescriptor(self.0) };
    }
}

impl Descriptor {
    fn new(kind: Kind) -> Result<Self, Refused> {
        let (api, mut raw) = (api()?, std::ptr::null_mut());
        // SAFETY: written by the call.
        let made = unsafe { api.cudnnBackendCreateDescriptor(kind, &mut raw) };
        made.result()
            .map_err(|status| format!("{kind:?}: {}", api.text(status)))?;
        Ok(Self(raw, api))
    }

    /// Sets an attribute. `V` must be what `kind` says; the setters below see to it.
    fn set<V>(self, name: Name, kind: Type, values: &[V]) -> Result<Self, Refused> {
        // SAFETY: the library copies `values.len()` values of the type that `kind` names.
        let set = unsafe {
            self.1.cudnnBackendSetAttribute(
                self.0,
                name,
                kind,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        };
        set.result()
            .map_err(|status| format!("{name:?}: {}", self.1.text(status)))?;
        Ok(self)
    }

    fn ints(self, name: Name, values: &[i64]) -> Result<Self, Refused> {
        self.set(name, Type::CUDNN_TYPE_INT64, values)
    }

    fn flag(self, name: Name, value: bool) -> Result<Self, Refused> {
        self.set(name, Type::CUDNN_TYPE_BOOLEAN, &[value])
    }

    fn data(self, name: Name, value: Data) -> Result<Self, Refused> {
        self.set(name, Type::CUDNN_TYPE_DATA_TYPE, &[value])
    }

    fn descriptors(self, name: Name, values: &[&Self]) -> Result<Self, Refused> {
        let raw: Vec<_> = values.iter().map(|d| d.0).collect();
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw)
    }

    fn pointers(self, name: Name, values: &[*mut c_void]) -> Result<Self, Refused> {
        self.set(name, Type::CUDNN_TYPE_VOID_PTR, values)
    }

    fn finish(self) -> Result<Self, Refused> {
        // SAFETY: the descriptor is alive.
        said(self.1, "finish a descriptor", unsafe {
            self.1.cudnnBackendFinalize(self.0)
        })?;
        Ok(self)
    }
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub(super) struct GraphTensor(usize);

/// A graph under construction. Tensors have four dimensions.
#[derive(Default)]
pub(super) struct Graph {
    descriptors: Vec<Descriptor>,
    /// Places of the operations in `descriptors`.
    operations: Vec<usize>,
}

impl Graph {
    /// Numbers of tensors that are only steps between operations start here.
    const INNER: i64 = 1000;

    fn keep(&mut self, descriptor: Descriptor) -> usize {
        self.descriptors.push(descriptor);
        self.descriptors.len() - 1
    }

    fn at(&self, tensor: GraphTensor) -> &Descriptor {
        &self.descriptors[tensor.0]
    }

    fn tensor(
        &mut self,
        id: Option<i64>,
        data: Data,
        dims: [i64; 4],
        strides: [i64; 4],
        host: bool,
    ) -> Result<GraphTensor, Refused> {
        let number = id.unwrap_or(Self::INNER + self.descriptors.len() as i64);
        let made = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .ints(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[number])?
            .data(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, data)?
            .ints(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[16])?
            .ints(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &dims)?
            .ints(Name::CUDNN_ATTR_TENSOR_STRIDES, &strides)?
            .flag(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, id.is_none())?
            .flag(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, host)?
            .finish()?;
        Ok(GraphTensor(self.keep(made)))
    }

    /// An operand in device memory.
    pub fn operand(
        &mut self,
        id: i64,
        data: Data,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<GraphTensor, Refused> {
        self.tensor(Some(id), data, dims, strides, false)
    }

    /// A number in host memory.
    pub fn number(&mut self, id: i64) -> Result<GraphTensor, Refused> {
        self.tensor(Some(id), Data::CUDNN_DATA_FLOAT, [1; 4], [1; 4], true)
    }

    /// A step between operations, row-major.
    pub fn step(&mut self, data: Data, dims: [i64; 4]) -> Result<GraphTensor, Refused> {
        let strides = [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1];
        self.tensor(None, data, dims, strides, false)
    }

    /// y = the matrices of x with these sizes and strides: a transposition.
    pub fn transposed(
        &mut self,
        x: GraphTensor,
        data: Data,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<GraphTensor, Refused> {
        let y = self.tensor(None, data, dims, strides, false)?;
        let made = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &[self.at(x)])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &[self.at(y)])?
            .finish()?;
        self.operation(made);
        Ok(y)
    }

    fn operation(&mut self, made: Descriptor) {
        let at = self.keep(made);
        self.operations.push(at);
    }

    /// c = a b.
    pub fn product(
        &mut self,
        a: GraphTensor,
        b: GraphTensor,
        c: GraphTensor,
    ) -> Result<GraphTensor, Refused> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .data(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, Data::CUDNN_DATA_FLOAT)?
            .finish()?;
        let made = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &[self.at(a)])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &[self.at(b)])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &[self.at(c)])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&how])?
            .finish()?;
        self.keep(how);
        self.operation(made);
        Ok(c)
    }

    /// y = the sum, or maximum, over the dimensions in which y has size 1, or one per group of
    /// heads.
    pub fn sum(
        &mut self,
        sum: Sum,
        x: GraphTensor,
        y: GraphTensor,
    ) -> Result<GraphTensor, Refused> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .set(
                Name::CUDNN_ATTR_REDUCTION_OPERATOR,
                Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
                &[sum],
            )?
            .data(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Data::CUDNN_DATA_FLOAT)?
            .finish()?;
        let made = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &[self.at(x)])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &[self.at(y)])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&how])?
            .finish()?;
        self.keep(how);
        self.operation(made);
        Ok(y)
    }

    /// y = f(x) or f(x, b).
    pub fn each(
        &mut self,
        f: Function,
        x: GraphTensor,
        b: Option<GraphTensor>,
        y: GraphTensor,
    ) -> Result<GraphTensor, Refused> {
        let how = function(f, Data::CUDNN_DATA_FLOAT)?.finish()?;
        self.pointwise(how, x, b, None, y)
    }

    /// y = x where row index ≥ column index of the matrices, else `other`.
    pub fn causal(
        &mut self,
        x: GraphTensor,
        other: GraphTensor,
        dims: [i64; 4],
    ) -> Result<GraphTensor, Refused> {
        let mut index = |axis: i64| {
            let how = function(Function::CUDNN_POINTWISE_GEN_INDEX, Data::CUDNN_DATA_INT32)?;
            let how = how
                .ints(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?
                .finish()?;
            let y = self.step(Data::CUDNN_DATA_INT32, dims)?;
            self.pointwise(how, x, None, None, y)
        };
        let (row, column) = (index(2)?, index(3)?);
        let how = function(Function::CUDNN_POINTWISE_CMP_GE, Data::CUDNN_DATA_BOOLEAN)?.finish()?;
        let seen = self.step(Data::CUDNN_DATA_BOOLEAN, dims)?;
        let seen = self.pointwise(how, row, Some(column), None, seen)?;
        let how = function(
            Function::CUDNN_POINTWISE_BINARY_SELECT,
            Data::CUDNN_DATA_FLOAT,
        )?
        .finish()?;
        let y = self.step(Data::CUDNN_DATA_FLOAT, dims)?;
        self.pointwise(how, x, Some(other), Some(seen), y)
    }

    fn pointwise(
        &mut self,
        how: Descriptor,
        x: GraphTensor,
        b: Option<GraphTensor>,
        t: Option<GraphTensor>,
        y: GraphTensor,
    ) -> Result<GraphTensor, Refused> {
        let mut made = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[&how])?
            .descriptors(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &[self.at(x)])?;
        if let Some(b) = b {
            made = made.descriptors(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &[self.at(b)])?;
        }
        if let Some(t) = t {
            made = made.descriptors(Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &[self.at(t)])?;
        }
        let made = made
            .descriptors(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &[self.at(y)])?
            .finish()?;
        self.keep(how);
        self.operation(made);
        Ok(y)
    }
}

fn function(f: Function, precision: Data) -> Result<Descriptor, Refused> {
    Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
        .set(
            Name::CUDNN_ATTR_POINTWISE_MODE,
            Type::CUDNN_TYPE_POINTWISE_MODE,
            &[f],
        )?
        .data(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, precision)
}

/// For which GPU a plan is made.
pub(super) enum TargetGpu<'a> {
    /// The handle's.
    Handle(&'a CudnnHandle),
    /// One that need not be there, by its properties as JSON.
    #[cfg(test)]
    Properties(&'a str),
}

/// How to compute a graph.
pub(super) struct GraphPlan {
    plan: Descriptor,
    /// Bytes of device memory that a call needs.
    pub workspace: usize,
    /// What the plan was made of.
    _parts: Vec<Descriptor>,
}

impl GraphPlan {
    /// How many proposals are looked at.
    const PROPOSALS: usize = 8;

    /// The first plan that the library proposes and can make, with a workspace of at most `limit`
    /// bytes.
    pub fn new(graph: Graph, target: &TargetGpu<'_>, limit: usize) -> Result<Self, Refused> {
        let mut parts = graph.descriptors;
        let operations: Vec<&Descriptor> = graph.operations.iter().map(|at| &parts[*at]).collect();
        let whole = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        let whole = match target {
            TargetGpu::Handle(handle) => whole.set(
                Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
                Type::CUDNN_TYPE_HANDLE,
                &[handle.0],
            )?,
            #[cfg(test)]
            TargetGpu::Properties(_) => whole,
        };
        let whole = whole.finish()?;
        let device = match target {
            TargetGpu::Handle(_) => None,
            #[cfg(test)]
            TargetGpu::Properties(json) => Some(properties(json)?),
        };
        let advice = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&whole])?
            .set(
                Name::CUDNN_ATTR_ENGINEHEUR_MODE,
                Type::CUDNN_TYPE_HEUR_MODE,
                &[sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A],
            )?;
        let advice = match &device {
            Some(device) => {
                advice.descriptors(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[device])?
            }
            None => advice,
        };
        let advice = advice.finish()?;
        let configs = proposals(&advice)?;
        let mut why = "no engine computes this graph".to_owned();
        for config in configs {
            match Self::made(&config, target, device.as_ref()) {
                Ok((plan, workspace)) if workspace <= limit => {
                    parts.extend([whole, advice, config].into_iter().chain(device));
                    return Ok(Self {
                        plan,
                        workspace,
                        _parts: parts,
                    });
                }
                Ok((_, workspace)) => why = format!("needs {workspace} bytes, {limit} are given"),
                Err(refused) => why = refused,
            }
        }
        Err(why)
    }

    fn made(
        config: &Descriptor,
        target: &TargetGpu<'_>,
        device: Option<&Descriptor>,
    ) -> Result<(Descriptor, usize), Refused> {
        let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
            .descriptors(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config])?;
        let plan = match target {
            TargetGpu::Handle(handle) => plan.set(
                Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
                Type::CUDNN_TYPE_HANDLE,
                &[handle.0],
            )?,
            #[cfg(test)]
            TargetGpu::Properties(_) => plan,
        };
        let plan = match device {
            Some(device) => {
                plan.descriptors(Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[device])?
            }
            None => plan,
        };
        let plan = plan.finish()?;
        let (mut count, mut bytes) = (0, 0i64);
        // SAFETY: one number of the asked type is written.
        let asked = unsafe {
            plan.1.cudnnBackendGetAttribute(
                plan.0,
                Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                Type::CUDNN_TYPE_INT64,
                1,
                &mut count,
                (&raw mut bytes).cast(),
            )
        };
        said(plan.1, "workspace", asked)?;
        Ok((plan, bytes as usize))
    }

    /// Queues the plan on the handle's stream: operands by number, numbers as addresses in host
    /// memory.
    ///
    /// # Safety
    /// The addresses are what the graph says of the tensors with these numbers; numbers in host
    /// memory live past the call; `workspace` is device memory of [`GraphPlan::workspace`] bytes.
    pub unsafe fn run(
        &self,
        handle: &CudnnHandle,
        operands: &[(i64, u64)],
        workspace: u64,
    ) -> Result<(), Refused> {
        let ids: Vec<i64> = operands.iter().map(|(id, _)| *id).collect();
        let pointers: Vec<*mut c_void> = operands
            .iter()
            .map(|(_, address)| *address as usize as *mut c_void)
            .collect();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .ints(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?
            .pointers(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?
            .pointers(
                Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                &[workspace as usize as *mut c_void],
            )?
            .finish()?;
        // SAFETY: handle, plan and pack are alive; the addresses are the caller's promise.
        let queued = unsafe { handle.1.cudnnBackendExecute(handle.0, self.plan.0, pack.0) };
        said(handle.1, "cudnnBackendExecute", queued)
    }
}

/// What the heuristics propose, best first.
fn proposals(advice: &Descriptor) -> Result<Vec<Descriptor>, Refused> {
    let mut configs = (0..GraphPlan::PROPOSALS)
        .map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
        .collect::<Result<Vec<_>, _>>()?;
    let mut raw: Vec<_> = configs.iter().map(|config| config.0).collect();
    let mut count = 0;
    // SAFETY: room for that many descriptors, which the call fills and does not replace.
    let asked = unsafe {
        advice.1.cudnnBackendGetAttribute(
            advice.0,
            Name::CUDNN_ATTR_ENGINEHEUR_RESULTS,
            Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
            raw.len() as i64,
            &mut count,
            raw.as_mut_ptr().cast(),
        )
    };
    said(advice.1, "heuristics", asked)?;
    configs.truncate(count.max(0) as usize);
    Ok(configs)
}

#[cfg(test)]
fn properties(json: &str) -> Result<Descriptor, Refused> {
    let text: Vec<u8> = json.bytes().chain([0]).collect();
    Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?
        .set(
            Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
            Type::CUDNN_TYPE_CHAR,
            &text,
        )?
        .finish()
}
