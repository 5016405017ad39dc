//! What is logged: the warnings that an engine keeps, and notes on devices.

use std::io;
use std::sync::{Arc, Mutex};

use roundpipe::nn::{Init, Linear};
use roundpipe::{
    Bytes, Cpu, DType, Devices, HostTensor, Ring, RingOptions, RoundPipe, RunConfig, Sequential,
};

/// A writer whose text a test can read.
#[derive(Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What `body` logs on this thread.
fn logged(body: impl FnOnce()) -> String {
    let text = Text::default();
    let writer = text.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .without_time()
        .with_ansi(false)
        .finish();
    tracing::subscriber::with_default(subscriber, body);
    let bytes = text.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

/// A batch smaller than its microbatches: a warning, once, in the log and to be taken.
#[test]
fn warnings_are_logged_and_kept() {
    let mut init = Init::new(1, DType::F32);
    let model = Sequential::new().with(Linear::new(&mut init, 2, 1, true).unwrap());
    let engine = RoundPipe::builder(model)
        .name("net")
        .devices([Cpu::new(Some(1)).unwrap() as _])
        .memory(Bytes::mib(16))
        .build()
        .unwrap();
    let x = HostTensor::zeros(DType::F32, &[2, 2]).unwrap();
    let run = |microbatches: usize| {
        let config = RunConfig::new().num_microbatch(microbatches);
        engine.forward(x.clone(), &config).unwrap();
    };
    let text = logged(|| run(4));
    let kept = engine.take_warnings();
    assert_eq!(kept.len(), 1);
    assert!(text.contains(&kept[0]) && text.contains("WARN"), "{text}");
    assert!(text.contains("engine=\"net\""), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_eq!(logged(|| run(2)), "", "nothing to warn of");
    assert!(engine.take_warnings().is_empty());
}

#[test]
fn notes_on_devices_are_logged() {
    let mut devices = Devices::parse("cpu").unwrap();
    devices.skipped.push("cuda:7 was left out".to_owned());
    let options = RingOptions {
        memory: Some(Bytes::mib(16)),
        ..RingOptions::default()
    };
    let text = logged(|| {
        let ring = Ring::of(&devices, &options).unwrap();
        assert!(
            ring.notes()
                .iter()
                .any(|note| note == "cuda:7 was left out")
        );
    });
    assert!(
        text.contains("INFO") && text.contains("cuda:7 was left out"),
        "{text}"
    );
}
