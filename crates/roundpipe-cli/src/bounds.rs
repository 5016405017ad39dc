//! Numbers from the command line, compared with what a machine can do before anything is made of
//! them.

use anyhow::ensure;
use roundpipe::Bytes;

/// More threads than any machine runs well; starting a hundred thousand never ends.
const MOST_THREADS: usize = 1024;

/// A number of threads.
pub fn threads(name: &str, count: Option<usize>) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = MOST_THREADS.max(cores);
    ensure!(
        count.is_none_or(|count| (1..=most).contains(&count)),
        "{name} must be from 1 to {most}"
    );
    Ok(())
}

/// Tokens of a step: their ids and labels alone must fit into `memory`.
pub fn tokens(batch: usize, seq: usize, memory: Bytes) -> anyhow::Result<usize> {
    let bytes = (batch as u128 * seq as u128).saturating_mul(2 * size_of::<i64>() as u128);
    let fits = bytes <= u128::from(memory.0) && usize::try_from(bytes).is_ok();
    ensure!(
        fits,
        "--batch {batch} of {seq} tokens is more than this machine's {memory} of memory can hold"
    );
    Ok(batch * seq)
}

#[cfg(test)]
mod tests {
    use roundpipe::Bytes;

    use super::{threads, tokens};

    #[test]
    fn what_no_machine_can_do_is_one_line() {
        assert_eq!(tokens(4, 32, Bytes(2048)).unwrap(), 128);
        for (batch, seq) in [
            (4, 33),
            (usize::MAX, 128),
            (usize::MAX, usize::MAX),
            (1 << 40, 1 << 40),
        ] {
            let error = tokens(batch, seq, Bytes(2048)).unwrap_err().to_string();
            assert!(
                error.contains("--batch") && error.lines().count() == 1,
                "{error}"
            );
        }
        assert!(tokens(usize::MAX, 1, Bytes(u64::MAX)).is_err());
        threads("--threads", None).unwrap();
        threads("--threads", Some(2)).unwrap();
        for count in [0, 100_000, usize::MAX] {
            assert!(
                threads("--threads", Some(count))
                    .unwrap_err()
                    .to_string()
                    .contains("--threads")
            );
        }
    }
}
