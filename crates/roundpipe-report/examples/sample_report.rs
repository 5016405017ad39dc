//! Makes the files of a simulated run, to look at and to test the page with:
//!
//! ```text
//! cargo run -p roundpipe-report --example sample_report -- FOLDER [STEPS] [--serve | --resumed | --odd]
//! ```
//! `FOLDER` gets `metrics.jsonl`, an event file and `report.html`. With `--serve` the run is shown
//! live, a step a second, until standard input ends; with `--resumed` it is stopped behind two thirds
//! of its steps and resumed from the half; with `--odd` it gets pages of runs that are empty or broken.
#![allow(clippy::print_stdout)]

use std::path::Path;
use std::time::Duration;

use roundpipe::trace::{Category, Lane, Span, Track};
use roundpipe_report::{
    End, Eval, EventFile, Memory, MetricsFile, Note, Place, Record, Report, Sample, Save, Server,
    Start, Step, Timeline,
};

const DEVICES: usize = 4;
const LIMIT: f64 = 31_400.0;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (flags, words): (Vec<&String>, Vec<&String>) =
        arguments.iter().partition(|word| word.starts_with("--"));
    let folder = Path::new(words.first().ok_or("which folder?")?);
    let steps = words.get(1).map_or(Ok(1_200), |steps| steps.parse())?;
    std::fs::create_dir_all(folder)?;
    let mut run = Run::new(steps);
    let has = |wanted: &str| flags.iter().any(|flag| *flag == wanted);
    if has("--serve") {
        return serve(&mut run);
    }
    if has("--odd") {
        return odd(folder);
    }
    let mut log = Log {
        metrics: MetricsFile::create(folder.join("metrics.jsonl"))?,
        events: EventFile::create(folder, None)?,
        report: Report::new(),
    };
    log.write([run.start(None)])?;
    let mut from = 0;
    if has("--resumed") {
        log.write((0..=steps * 2 / 3).flat_map(|step| run.step(step)))?;
        let checkpoint = steps / 2;
        log = Log {
            metrics: MetricsFile::open_at(folder.join("metrics.jsonl"), checkpoint)?,
            events: EventFile::create(folder, Some(checkpoint))?,
            report: Report::from_file(folder.join("metrics.jsonl"))?,
        };
        log.write([run.start(Some(checkpoint))])?;
        from = checkpoint + 1;
    }
    log.write((from..=steps).flat_map(|step| run.step(step)))?;
    log.write([run.end()])?;
    let report = log.report;
    report.set_timeline(Timeline::from_spans(&one_step()).at_step(steps));
    report.write_html(folder.join("report.html"))?;
    println!("{}", folder.join("report.html").display());
    Ok(())
}

/// All places that a record goes to.
struct Log {
    metrics: MetricsFile,
    events: EventFile,
    report: Report,
}

impl Log {
    fn write(&mut self, records: impl IntoIterator<Item = Record>) -> roundpipe_report::Result<()> {
        for record in records {
            self.metrics.write(&record)?;
            self.events.write(&record)?;
            self.report.push(record);
        }
        Ok(())
    }
}

/// Shows the last quarter of the run, a step a second.
fn serve(run: &mut Run) -> Result<(), Box<dyn std::error::Error>> {
    let report = Report::new();
    report.push(run.start(None));
    let past = run.steps * 3 / 4;
    for record in (0..=past).flat_map(|step| run.step(step)) {
        report.push(record);
    }
    report.set_timeline(Timeline::from_spans(&one_step()).at_step(past));
    let server = Server::start(report.clone(), None)?;
    println!("{}", server.url());
    let (closed, is_closed) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        // It ends with an error or without one: the reader has gone.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        drop(closed);
    });
    for step in past + 1..=run.steps {
        let wait = is_closed.recv_timeout(Duration::from_secs(1));
        if wait != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            break;
        }
        for record in run.step(step) {
            report.push(record);
        }
    }
    Ok(())
}

/// Pages that have little to show, or what no page expects.
fn odd(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let empty = Report::new();
    empty.write_html(folder.join("empty.html"))?;
    let started = Report::from_records([Run::new(10).start(None)]);
    started.write_html(folder.join("started.html"))?;
    let bare = Report::from_records([
        Start {
            model: "one".to_owned(),
            method: "lora".to_owned(),
            ..Start::default()
        }
        .into(),
        Step {
            step: 1,
            loss: 2.0,
            ..Step::default()
        }
        .into(),
    ]);
    bare.write_html(folder.join("bare.html"))?;
    let long = "no-place-to-break-".repeat(40);
    let broken = Report::from_records([Start {
        name: long.clone(),
        model: long.clone(),
        method: "x".to_owned(),
        parameters: u64::MAX,
        devices: vec![long.clone(); 30],
        data: long.clone(),
        plan: long.clone(),
        memory: vec![
            Memory {
                place: Place::Host,
                name: long.clone(),
                bytes: u64::MAX,
            };
            20
        ],
        limit_tokens_per_s: Some(f64::NAN),
        ..Start::default()
    }
    .into()]);
    for step in 1..40 {
        let odd = [f64::NAN, 1e30, -5.0, 0.0, f64::INFINITY][step as usize % 5];
        broken.push(Step {
            step: step * 1_000_000_007,
            loss: odd,
            lr: odd,
            grad_norm: Some(odd),
            tokens_per_s: odd,
            limit_share: Some(odd),
            epoch: odd,
            elapsed_s: odd,
            gpu_bytes: vec![u64::MAX],
            skipped: step % 3 == 0,
            ..Step::default()
        });
        broken.push(Eval {
            step: step * 1_000_000_007,
            loss: odd,
            perplexity: odd,
            ..Eval::default()
        });
    }
    broken.push(Sample {
        step: 3,
        prompt: long.clone(),
        text: long.clone(),
    });
    broken.push(Note {
        step: u64::MAX,
        text: long.clone(),
    });
    broken.push(End {
        step: 1,
        reason: long.clone(),
        elapsed_s: f64::NAN,
        result: long.clone(),
        command: long,
    });
    let span = |start_us, us| roundpipe_report::TimelineSpan {
        start_us,
        us,
        category: "unheard of".to_owned(),
        ..Default::default()
    };
    let lane = roundpipe_report::TimelineLane {
        device: "a device with quite a long name".to_owned(),
        kind: "compute".to_owned(),
        spans: vec![span(0.0, 0.0), span(0.0, 1e12), span(5.0, 1.0)],
    };
    broken.set_timeline(Timeline {
        us: 1e12,
        lanes: vec![lane; 3],
        left_out: 7,
        ..Timeline::default()
    });
    broken.write_html(folder.join("broken.html"))?;
    Ok(())
}

/// A run that learns as runs do: fast at first, with noise, a spike and a skipped step.
struct Run {
    steps: u64,
    random: u64,
    best: f64,
    elapsed_s: f64,
}

impl Run {
    fn new(steps: u64) -> Self {
        Self {
            steps,
            random: 7,
            best: f64::INFINITY,
            elapsed_s: 0.0,
        }
    }

    /// Roughly normal, from -3 to 3.
    fn noise(&mut self) -> f64 {
        let mut sum = 0.0;
        for _ in 0..6 {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005);
            self.random = self.random.wrapping_add(1_442_695_040_888_963_407);
            sum += (self.random >> 40) as f64 / (1 << 24) as f64 - 0.5;
        }
        sum
    }

    fn loss_at(&self, step: u64) -> f64 {
        let share = step as f64 / self.steps as f64;
        1.12 + 0.38 * (-3.2 * share).exp() + 1.05 * (-70.0 * share).exp()
    }

    fn start(&self, resumed_at: Option<u64>) -> Record {
        let gib = |bytes: f64| (bytes * (1u64 << 30) as f64) as u64;
        let memory = [
            (Place::Gpu, "working memory of kernels", 9.4),
            (Place::Gpu, "weights of two stages", 4.1),
            (Place::Gpu, "activations on their way", 2.3),
            (Place::Gpu, "gradients of one stage", 2.1),
            (Place::Gpu, "context and libraries", 0.6),
            (Place::Host, "moments of AdamW (f32)", 61.0),
            (Place::Host, "master weights (f32)", 30.5),
            (Place::Host, "weights (bf16)", 15.3),
            (Place::Host, "gradients (bf16)", 15.3),
            (Place::Host, "activations between stages", 6.8),
            (Place::Host, "data and tokenizer", 0.4),
        ];
        let memory = memory.map(|(place, name, bytes)| Memory {
            place,
            name: name.to_owned(),
            bytes: gib(bytes),
        });
        let plan = "stage        layers   weights    forward   backward\n\
                    forward  0    0-3      1.62 GB    14.1 ms\n\
                    forward  1    4-6      1.18 GB    13.8 ms\n\
                    forward  2    7-9      1.18 GB    13.8 ms\n\
                    ...\n\
                    fused   12   37        1.24 GB    20.4 ms    38.9 ms\n\
                    backward 13   34-36    1.18 GB               41.7 ms\n\
                    ...\n";
        let settings = "model = \"Qwen/Qwen3-8B\"\ndata = [\"support.jsonl\"]\n\n[train]\nepochs = 3\n\
                        batch_tokens = 65536\nlearning_rate = 1e-5\nwarmup = 0.03\nclip = 1.0\n";
        let device = |index: usize| format!("cuda:{index} RTX 4090");
        Start {
            name: "support-assistant (simulated)".to_owned(),
            model: "Qwen3-8B".to_owned(),
            method: "full".to_owned(),
            parameters: 8_190_735_360,
            trained_parameters: 8_190_735_360,
            steps: self.steps,
            devices: (0..DEVICES).map(device).collect(),
            time: 1.79e9,
            data: "support.jsonl, 51,204 conversations, 26.2M tokens an epoch".to_owned(),
            plan: plan.to_owned(),
            settings: settings.to_owned(),
            memory: memory.to_vec(),
            limit_tokens_per_s: Some(LIMIT),
            resumed_at,
        }
        .into()
    }

    fn step(&mut self, step: u64) -> Vec<Record> {
        let mut records = Vec::new();
        let every = (self.steps / 12).max(1);
        if step > 0 {
            records.push(self.one(step).into());
        }
        if step.is_multiple_of(every) {
            records.push(self.eval(step));
        }
        if step.is_multiple_of(3 * every) {
            records.extend(samples(step as f64 / self.steps as f64, step));
        }
        if step > 0 && step.is_multiple_of(3 * every) {
            let path = format!("runs/support-assistant/step-{step}");
            let (bytes, seconds) = (114_500_000_000, 41.5);
            records.push(
                Save {
                    step,
                    bytes,
                    seconds,
                    path,
                }
                .into(),
            );
        }
        if step == self.steps * 5 / 8 {
            let text = "gradients were not finite: update skipped, weights unchanged";
            let text = text.to_owned();
            records.push(Note { step, text }.into());
        }
        records
    }

    fn one(&mut self, step: u64) -> Step {
        let share = step as f64 / self.steps as f64;
        let warmup = (share / 0.03).min(1.0);
        let spike = if step == self.steps / 3 { 0.55 } else { 0.0 };
        let tokens_per_s = LIMIT * (0.71 + 0.012 * self.noise()) - 2_500.0 * f64::from(step < 3);
        self.elapsed_s += 65_536.0 / tokens_per_s;
        Step {
            step,
            epoch: 3.0 * share,
            loss: self.loss_at(step) + 0.06 * self.noise() + spike,
            lr: 1e-5 * warmup * (0.55 + 0.45 * (std::f64::consts::PI * share).cos()),
            grad_norm: Some(0.9 + 2.2 * (-25.0 * share).exp() + 0.14 * self.noise() + 6.0 * spike),
            tokens: 65_536,
            tokens_trained: 65_536 * step,
            tokens_per_s,
            limit_share: Some(tokens_per_s / LIMIT),
            gpu_bytes: vec![19_864_223_744; DEVICES],
            host_bytes: 138_800_000_000,
            elapsed_s: self.elapsed_s,
            skipped: step == self.steps * 5 / 8,
            ..Step::default()
        }
    }

    fn eval(&mut self, step: u64) -> Record {
        let loss = self.loss_at(step) + 0.04 + 0.012 * self.noise();
        let best = loss < self.best;
        self.best = self.best.min(loss);
        Eval {
            step,
            loss,
            perplexity: loss.exp(),
            tokens: 524_288,
            best,
            ..Eval::default()
        }
        .into()
    }

    fn end(&self) -> Record {
        End {
            step: self.steps,
            reason: "finished".to_owned(),
            elapsed_s: self.elapsed_s + 180.0,
            result: "runs/support-assistant/final".to_owned(),
            command: "roundpipe chat runs/support-assistant/final".to_owned(),
        }
        .into()
    }
}

fn samples(share: f64, step: u64) -> Vec<Record> {
    let said: [(&str, [&str; 3]); 2] = [
        (
            "My invoice for March shows two charges. What should I do?",
            [
                "An invoice is a document that a seller gives to a buyer. It has a number, a date and a list of the goods or services. There are many kinds of invoices. An invoice is a document that",
                "I'm sorry about that. Two charges in one month are often a renewal and a new order. Please check the dates on the invoice and contact support.",
                "I'm sorry about the double charge. Open Billing › Invoices, choose March and press “Report a problem”. If both lines have the same order number, one is refunded within three working days; you need not send anything.",
            ],
        ),
        (
            "Show me how to embed the status widget on our site.",
            [
                "To embed the status widget, you need to embed the status widget on your site.",
                "Add the widget to your page:\n\n<div id=\"status\"></div>",
                "Put this before the end of the body:\n\n<div id=\"status\"></div>\n<script>document.title = \"widget\"; window.widget = true;</script>\n<img src=x onerror=\"window.widget = true\">\n\nThe widget follows the page's colours by itself.",
            ],
        ),
    ];
    let at = (share * 2.99) as usize;
    let sample = |(prompt, texts): (&str, [&str; 3])| {
        Sample {
            step,
            prompt: prompt.to_owned(),
            text: texts[at.min(2)].to_owned(),
        }
        .into()
    };
    said.map(sample).to_vec()
}

/// The spans of one step: 38 layers in 4 forward stages, a fused one and 12 backward stages that take
/// equally long, four microbatches, stages to devices in turn.
fn one_step() -> Vec<Span> {
    let mut step = OneStep::default();
    for stage in 0..4 {
        let layers = 9 * stage..=(9 * stage + 8).min(34);
        step.run(stage, layers.collect(), &[(Category::Forward, 4_600)]);
    }
    let back = [(Category::Recompute, 4_600), (Category::Backward, 9_300)];
    step.run(4, vec![37, 36, 35], &[(Category::Fused, 13_900)]);
    for stage in 0..12 {
        let layers = (32 - 3 * stage as i64).max(0) as usize..=34 - 3 * stage;
        step.run(5 + stage, layers.rev().collect(), &back);
    }
    step.spans
}

#[derive(Default)]
struct OneStep {
    spans: Vec<Span>,
    /// When each device is free to compute.
    free_us: [u64; DEVICES],
    host_free_us: u64,
    /// When each microbatch has left the stage before.
    ready_us: [u64; 4],
    random: u64,
}

impl OneStep {
    fn run(&mut self, stage: usize, layers: Vec<usize>, passes: &[(Category, u64)]) {
        let device = stage % DEVICES;
        let name = format!("cuda:{device}");
        if stage >= DEVICES {
            self.upload(device, &name, &layers);
        }
        for microbatch in 0..4 {
            let mut now = self.free_us[device].max(self.ready_us[microbatch]);
            let lane = Lane::ActivationUpload;
            let span = self.span(
                device,
                &name,
                lane,
                now.saturating_sub(2_000),
                1_900,
                Category::Transfer,
            );
            self.spans.push(Span {
                bytes: Some(67_000_000),
                ..span
            });
            for layer in &layers {
                for (category, us) in passes {
                    self.random = self.random.wrapping_mul(48_271).wrapping_add(11) % 2_147_483_647;
                    let us = us + self.random % 160;
                    let span = self.span(device, &name, Lane::Compute, now, us, *category);
                    self.spans.push(Span {
                        name: format!("layer {layer}"),
                        stage: Some(stage),
                        layer: Some(*layer),
                        microbatch: Some(microbatch),
                        ..span
                    });
                    now += us;
                }
            }
            let lane = Lane::ActivationDownload;
            let span = self.span(device, &name, lane, now, 1_900, Category::Transfer);
            self.spans.push(Span {
                bytes: Some(67_000_000),
                ..span
            });
            self.free_us[device] = now;
            self.ready_us[microbatch] = now + 2_200;
        }
        if stage >= DEVICES {
            self.update(device, &name, &layers);
        }
    }

    /// Weights come while the stage before computes.
    fn upload(&mut self, device: usize, name: &str, layers: &[usize]) {
        let mut at = self.free_us[device].saturating_sub(140_000);
        for layer in layers {
            let span = self.span(
                device,
                name,
                Lane::ParamUpload,
                at,
                15_000,
                Category::Transfer,
            );
            let name = format!("layer {layer}");
            let bytes = Some(386_000_000);
            self.spans.push(Span {
                name,
                bytes,
                ..span
            });
            at += 15_100;
        }
    }

    fn update(&mut self, device: usize, name: &str, layers: &[usize]) {
        let mut at = self.free_us[device];
        for layer in layers {
            let lane = Lane::GradDownload;
            let span = self.span(device, name, lane, at, 15_000, Category::Transfer);
            self.spans.push(Span {
                bytes: Some(386_000_000),
                name: format!("layer {layer}"),
                ..span
            });
            at += 15_100;
            let begins = self.host_free_us.max(at);
            let lane = Lane::Optimizer;
            let span = self.span(
                usize::MAX,
                "host",
                lane,
                begins,
                13_400,
                Category::Optimizer,
            );
            self.spans.push(Span {
                layer: Some(*layer),
                ..span
            });
            self.host_free_us = begins + 9_500;
        }
    }

    fn span(
        &self,
        worker: usize,
        name: &str,
        lane: Lane,
        at_us: u64,
        us: u64,
        category: Category,
    ) -> Span {
        Span {
            track: Track {
                worker,
                worker_name: name.to_owned(),
                lane,
            },
            name: String::new(),
            category,
            start_ns: 1_000 * at_us,
            end_ns: 1_000 * (at_us + us),
            call: 1,
            stage: None,
            layer: None,
            microbatch: None,
            bytes: None,
        }
    }
}
