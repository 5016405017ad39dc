//! Work that is queued once and launched many times, as a CUDA graph.
//!
//! Launches of small kernels take the host longer than the GPU needs for them. Captured into a graph,
//! all kernels of a step are one launch.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Gpu;
use crate::device::Replay;
use crate::error::Result;

/// A captured graph, and the stream that it runs in.
pub(super) struct CudaGraph {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: driver handles may be used from any thread while their context is current there; a launch
// takes `&self`, and the driver locks.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Captures what `body` queues in `stream` from this thread; nothing of it runs.
    pub(super) fn capture(
        gpu: &Arc<Gpu>,
        stream: sys::CUstream,
        body: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        gpu.enter()?;
        let failed = |error| gpu.failed("record a step", error);
        // Other threads go on as they like.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is the lane's and lives as long as its device.
        unsafe { result::stream::begin_capture(stream, mode) }.map_err(failed)?;
        let done = body();
        // In any case, so that the stream goes on as a stream.
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(stream) };
        done?;
        let graph = graph.map_err(failed)?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just given by the driver.
        let exec = unsafe { result::graph::instantiate(graph, flags) };
        let exec = match exec {
            Ok(exec) => exec,
            Err(error) => {
                // SAFETY: nothing else has the graph.
                let _ = unsafe { sys::cuGraphDestroy(graph) };
                return Err(failed(error));
            }
        };
        Ok(Self {
            gpu: gpu.clone(),
            stream,
            graph,
            exec,
        })
    }
}

impl Replay for CudaGraph {
    unsafe fn launch(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: the graph is whole; the caller vouches for the memory that its kernels touch.
        unsafe { result::graph::launch(self.exec, self.stream) }
            .map_err(|error| self.gpu.failed("repeat a step", error))
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.gpu.current().is_ok() {
            // SAFETY: made by `capture`; the driver waits for launches that are under way.
            unsafe {
                let _ = sys::cuGraphExecDestroy(self.exec);
                let _ = sys::cuGraphDestroy(self.graph);
            }
        }
    }
}
