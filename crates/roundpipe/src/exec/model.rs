//! A model as executors see it.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use roundpipe_tensor::{Cx, ParamId, Result as TensorResult, Tensor};

use super::early_rows::EarlyRows;
use super::hooks::Hooks;
use super::repeats::Repeats;
use super::row_gradients::LandedRows;
use crate::layer::Layer;
use crate::store::Store;
use crate::tree::Tree;

/// Turns a microbatch's outputs and labels into losses.
pub(crate) type LossFn =
    Arc<dyn Fn(&mut Cx, Tree, Tree) -> TensorResult<Vec<Tensor>> + Send + Sync>;

/// The layers of an engine and the host memory of their state.
pub(crate) struct Model {
    pub name: String,
    pub layers: Vec<(String, Arc<dyn Layer>)>,
    pub store: Store,
    pub seed: u64,
    /// Set once a layer has set a buffer. Calls then run one after another.
    pub sets_buffers: AtomicBool,
    /// The buffers that calls have set, which a checkpoint keeps.
    pub set_buffers: Mutex<HashSet<ParamId>>,
    /// Whether unchanged weights stay on a worker from call to call.
    pub resident: bool,
    /// Whether weights are only read.
    pub inference: bool,
    /// What is known of its layers' recomputes.
    pub repeats: Repeats,
    /// What calls ask of the update under way.
    pub early_rows: EarlyRows,
    /// What is known of the table's gradient in host memory.
    pub landed_rows: LandedRows,
    /// Whether projections run in fp8, in training.
    pub fp8: bool,
    /// What is registered now; a call takes it as it is.
    pub hooks: Mutex<Arc<Hooks>>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({})", self.name)
    }
}
