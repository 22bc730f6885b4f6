//! A CubeCL server that records kernels instead of running them, with the properties of a CUDA device.

use crate::codegen::cuda::{self, Gpu};
#[cfg(test)]
use crate::codegen::kernel_name;
use cubecl::CubeKernel;
use cubecl::client::Client;
use cubecl::prelude::CubeCount;
use cubecl::server::{
    BufferBinding, CopyDescriptor, KernelArguments, ProfileError, ProfilingToken, Server,
    ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_common::profile::ProfileDuration;
use cubecl_environment::future::DynFut;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::dry_run::LaunchMode;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport,
};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
use cubecl_server::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_server::storage::BytesStorage;
use std::sync::{Arc, Mutex};

/// The kernels that were launched since they were last taken, in order.
static LAUNCHED: Mutex<Vec<Box<dyn CubeKernel>>> = Mutex::new(Vec::new());

/// The client of the recorder that represents a device; buffers take no memory and have no content.
pub(crate) fn client(gpu: Gpu) -> Client {
    let index = Gpu::ALL.iter().position(|other| *other == gpu);
    Client::load::<Recorder>(DeviceId::new(0, index.expect("all are listed") as u16))
}

/// The kernels that `run` launches, in order. One recording at a time.
pub(crate) fn record(client: &Client, run: impl FnOnce(&Client)) -> Vec<Box<dyn CubeKernel>> {
    static RECORDING: Mutex<()> = Mutex::new(());
    let _alone = RECORDING.lock().expect("no recording panics");
    run(client);
    client.flush().expect("the recorder does not fail");
    std::mem::take(&mut *LAUNCHED.lock().expect("no recording panics"))
}

#[cfg(test)]
pub(crate) fn names(client: &Client, run: impl FnOnce(&Client)) -> Vec<String> {
    let kernels = record(client, run).into_iter();
    kernels
        .map(|kernel| kernel_name(kernel.id().type_name()).to_owned())
        .collect()
}

#[derive(Debug)]
struct Recorder {
    utilities: Arc<ServerUtilities>,
    /// The buffers in use: as in a pool, a buffer counts until it has no other owner.
    buffers: Vec<ManagedMemoryHandle>,
}

impl DeviceService for Recorder {
    fn init(device_id: DeviceId) -> Self {
        let (utilities, _captures) = ServerUtilities::init(
            ServiceId::of::<Self>(device_id),
            "recorder",
            cuda::device_properties(Gpu::ALL[usize::from(device_id.index_id)]),
            cubecl_cuda::CudaRuntime::target_properties(),
            Arc::new(ServerLogger::default()),
            ContiguousMemoryLayoutPolicy::new(512),
        );
        Self {
            utilities: Arc::new(utilities),
            buffers: Vec::new(),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for Recorder {}

impl Server for Recorder {
    fn initialize_memory(
        &mut self,
        memory: ManagedMemoryHandle,
        _size: u64,
        _stream_id: StreamId,
    ) -> Result<(), ServerError> {
        self.buffers.retain(|buffer| !buffer.is_free());
        self.buffers.push(memory);
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        _descriptors: Vec<CopyDescriptor>,
        _stream_id: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        unreachable!("a launch that reads from the device would stall it")
    }

    fn write(&mut self, _descriptors: Vec<(CopyDescriptor, Bytes)>, _stream_id: StreamId) {}

    fn sync(
        &mut self,
        _handles: Vec<BufferBinding>,
        _stream_id: StreamId,
    ) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn check(
        &mut self,
        _handles: Vec<BufferBinding>,
        _stream_id: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        _count: CubeCount,
        _bindings: KernelArguments,
        _stream_id: StreamId,
        _launch_mode: LaunchMode,
    ) {
        LAUNCHED.lock().expect("no recording panics").push(kernel);
    }

    fn flush(&mut self, _stream_id: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _stream_id: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _stream_id: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _stream_id: StreamId) -> Result<ProfilingToken, ServerError> {
        unreachable!("nothing runs that could be timed")
    }

    fn end_profile(
        &mut self,
        _stream_id: StreamId,
        _token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        unreachable!("nothing runs that could be timed")
    }

    fn allocation_mode(&mut self, _mode: MemoryAllocationMode, _stream_id: StreamId) {}
}

impl ServerStorage for Recorder {
    type Storage = BytesStorage;

    fn get_resource(
        &mut self,
        _binding: BufferBinding,
        _stream_id: StreamId,
    ) -> Result<ManagedResource<<BytesStorage as ComputeStorage>::Resource>, ServerError> {
        unreachable!("the recorder's buffers hold nothing")
    }
}
