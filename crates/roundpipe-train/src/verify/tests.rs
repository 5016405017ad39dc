//! The comparisons in process, on the smallest subjects: all hold here, and a fault is found.

use std::sync::atomic::AtomicBool;

use roundpipe::RoundPipe;

use super::checks::{Scratch, resumed_through};
use super::*;
use crate::verify::trail::Kind;

#[derive(Default)]
struct Seen(Vec<String>);

impl VerifyWatcher for Seen {
    fn note(&mut self, line: &str) {
        self.0.push(line.to_owned());
    }

    fn compared(&mut self, comparison: &Comparison) {
        self.0.push(comparison.claim.clone());
    }
}

fn options() -> VerifyOptions {
    VerifyOptions {
        model: None,
        devices: Some("cpu".into()),
        quick: true,
    }
}

/// Every claim holds over values of every kind, and all but the GPU's were compared.
#[test]
fn every_claim_holds_on_a_processor() {
    let mut seen = Seen::default();
    let report = verify(&options(), &mut seen, &AtomicBool::new(false)).unwrap();
    let text = format!("{report:#?}");
    assert!(report.holds, "{text}");
    assert_eq!(report.subjects.len(), 3);
    assert_eq!(seen.0.len(), 1 + 3 + report.comparisons.len());
    for comparison in &report.comparisons {
        let is_gpu = comparison.claim.starts_with("GPU");
        let skipped = comparison.outcome == Outcome::Skipped;
        assert_eq!(is_gpu, skipped, "{comparison:#?}");
        assert!(is_gpu || comparison.values() > 0, "{comparison:#?}");
        assert_eq!(comparison.differ(), 0, "{comparison:#?}");
    }
    let has = |claim: &str, kind: Kind| {
        let claims = report.comparisons.iter().filter(|c| c.claim == claim);
        claims
            .flat_map(|c| &c.counted)
            .filter(|c| c.kind == kind)
            .count()
    };
    for kind in [
        Kind::Losses,
        Kind::Gradients,
        Kind::Weights,
        Kind::Masters,
        Kind::Moments,
    ] {
        assert_eq!(has("1 worker = 3 workers", kind), 3, "{kind:?}");
        assert_eq!(has("resumed = uninterrupted", kind), 3, "{kind:?}");
    }
    assert_eq!(has("every copy is ordered", Kind::Accesses), 3);
}

/// A run that goes on without its moments has other weights and other moments.
#[test]
fn a_resume_without_moments_differs() {
    let place = Place::open(Some("cpu")).unwrap();
    let subject = Subject::choose(&options()).unwrap().remove(0);
    let without_moments = |engine: &RoundPipe| {
        let mut state = engine.training_state()?;
        for param in state.params.values_mut() {
            for moment in &mut param.moments {
                *moment = roundpipe::HostTensor::zeros(moment.dtype(), moment.dims())?;
            }
        }
        Ok(engine.load_training_state(&state)?)
    };
    let scratch = Scratch::new();
    let found = resumed_through(&subject, &place, &scratch.0, &without_moments).unwrap();
    assert!(!found.holds());
}

/// The user's devices and models are refused in one line.
#[test]
fn what_cannot_be_verified_is_refused() {
    for (model, devices, word) in [
        (None, "tpu", "devices"),
        (Some("/no/such/model"), "cpu", "/no/such/model"),
    ] {
        let options = VerifyOptions {
            model: model.map(str::to_owned),
            devices: Some(devices.to_owned()),
            quick: true,
        };
        let error = verify(&options, &mut Seen::default(), &AtomicBool::new(false)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(word) && !text.contains('\n'), "{text}");
    }
    let stopped = verify(&options(), &mut Seen::default(), &AtomicBool::new(true));
    assert!(stopped.is_err());
}

/// A large model is cut to what this machine compares in minutes, and the line says so.
#[test]
fn a_model_is_cut_to_its_first_layers() {
    let cut = |model: &str| {
        let options = VerifyOptions {
            model: Some(model.into()),
            ..options()
        };
        Subject::choose(&options).map(|mut all| all.remove(0))
    };
    let tiny = cut("tiny").unwrap();
    assert_eq!(tiny.layers(), 6);
    if let Ok(large) = cut("qwen3-8b") {
        let line = large.line();
        assert!(
            large.layers() < 10 && line.contains("of 36 layers"),
            "{line}"
        );
        assert!(line.contains("2048 of its tokens"), "{line}");
    }
    if let Ok(medium) = cut("qwen2.5-0.5b") {
        assert!(medium.num_params() <= 160_000_000, "{}", medium.line());
    }
}
