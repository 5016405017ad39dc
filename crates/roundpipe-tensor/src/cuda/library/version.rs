//! Which versions go together: driver, libraries and cards, as values. Nothing here asks the
//! machine.

use std::fmt;

/// A version of CUDA: of a driver, or of what a library was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Before the point: libraries of a newer one than the driver's do not run.
    pub major: u32,
    /// Behind the point.
    pub minor: u32,
}

impl Version {
    /// The oldest that drivers and libraries may be of.
    pub const OLDEST: Self = Self::new(12, 0);

    /// `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// As the driver counts: 12040 is 12.4.
    pub(super) const fn of_number(number: u32) -> Self {
        Self::new(number / 1000, number % 1000 / 10)
    }

    /// The same of what a library says that it was made for; `None` for what is no version.
    pub(super) fn of_library(number: usize) -> Option<Self> {
        u32::try_from(number)
            .ok()
            .filter(|number| *number >= 1000)
            .map(Self::of_number)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The oldest cuDNN whose attention was compared, as cuDNN counts.
pub(crate) const OLDEST_CUDNN: usize = 91_400;

/// A version of cuDNN in words, of its number: 91400 is 9.14.0, and before 9 there was a digit
/// less.
pub fn cudnn_version(number: usize) -> String {
    match number {
        0..=9_999 => format!("{}.{}.{}", number / 1000, number / 100 % 10, number % 100),
        _ => format!(
            "{}.{}.{}",
            number / 10_000,
            number / 100 % 100,
            number % 100
        ),
    }
}

/// The packages that hold the libraries, of CUDA 13 and newer and of CUDA 12.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Package {
    Nvrtc,
    Cublas,
    Cudnn,
}

impl Package {
    /// The package that goes with a driver; the newest where none is known.
    pub fn name(self, driver: Option<Version>) -> &'static str {
        let old = driver.is_some_and(|driver| driver.major <= 12);
        match (self, old) {
            (Self::Nvrtc, false) => "nvidia-cuda-nvrtc",
            (Self::Nvrtc, true) => "nvidia-cuda-nvrtc-cu12",
            (Self::Cublas, false) => "nvidia-cublas",
            (Self::Cublas, true) => "nvidia-cublas-cu12",
            (Self::Cudnn, false) => "nvidia-cudnn-cu13",
            (Self::Cudnn, true) => "nvidia-cudnn-cu12",
        }
    }
}

/// Why a driver will not do.
pub(super) fn driver_verdict(driver: Version) -> Result<(), String> {
    if driver >= Version::OLDEST {
        return Ok(());
    }
    let needed = Version::OLDEST;
    Err(format!(
        "NVIDIA's driver is one for CUDA {driver}; one for {needed} or newer is needed (525 or newer): \
         update it, or run on the CPU"
    ))
}

/// Why a library does not go with the driver. `file` is what was found where; of `made_for`,
/// `major.minor` or less, the first number is compared.
pub(super) fn library_verdict(
    file: &str,
    (major, made_for): (u32, &str),
    driver: Option<Version>,
    package: Package,
) -> Result<(), String> {
    let get = package.name(driver);
    if major < Version::OLDEST.major {
        let needed = Version::OLDEST;
        return Err(format!(
            "{file} is for CUDA {made_for}; {needed} or newer is needed: `pip install {get}`"
        ));
    }
    match driver {
        Some(driver) if major > driver.major => Err(format!(
            "{file} is for CUDA {made_for}, newer than the driver, which is for {driver}: `pip install {get}`, \
             or update the driver"
        )),
        _ => Ok(()),
    }
}

/// For which of NVRTC's architectures a card's kernels are compiled: its own, or the newest before
/// it of the same major number, whose machine code it runs too. `known` is in no order.
pub(super) fn target(known: &[u32], card: u32) -> Option<u32> {
    known
        .iter()
        .copied()
        .filter(|arch| arch / 10 == card / 10 && *arch <= card)
        .max()
}

/// The first NVRTC that compiles for an architecture; `None` for those that this list does not
/// know.
fn first_for(card: u32) -> Option<Version> {
    Some(match card {
        80 => Version::new(11, 0),
        86 => Version::new(11, 1),
        87 => Version::new(11, 4),
        89 | 90 => Version::new(11, 8),
        100 | 101 | 120 => Version::new(12, 8),
        103 | 121 => Version::new(12, 9),
        88 | 110 => Version::new(13, 0),
        _ => return None,
    })
}

/// Why an NVRTC does not compile for a card.
pub(super) fn architecture_complaint(
    file: &str,
    version: Version,
    card: u32,
    driver: Option<Version>,
) -> String {
    let needed = match first_for(card) {
        Some(first) if first > version => format!("{first} or newer is needed"),
        _ => "a newer one is needed".to_owned(),
    };
    let get = Package::Nvrtc.name(driver);
    let driver = driver.map_or(String::new(), |driver| {
        format!("; the driver is for CUDA {driver}")
    });
    format!(
        "{file} is of CUDA {version} and does not compile for sm_{card}; {needed}: `pip install -U {get}`, or name \
         the folder of another in ROUNDPIPE_CUDA_LIBS{driver}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: fn(u32, u32) -> Version = Version::new;

    #[test]
    fn numbers_are_read_as_versions() {
        assert_eq!(Version::of_number(12_040), V(12, 4));
        assert_eq!(Version::of_number(13_000), V(13, 0));
        assert_eq!(Version::of_number(11_080).to_string(), "11.8");
        assert_eq!(cudnn_version(91_400), "9.14.0");
        assert_eq!(cudnn_version(91_002), "9.10.2");
        assert_eq!(cudnn_version(8_907), "8.9.7");
    }

    /// What a driver runs: its own major and older ones from 12 on, whatever the minors.
    #[test]
    fn libraries_are_not_newer_than_the_driver() {
        let runs = |library: Version, driver| {
            library_verdict(
                "lib",
                (library.major, &library.to_string()),
                driver,
                Package::Nvrtc,
            )
            .is_ok()
        };
        assert!(runs(V(12, 9), Some(V(12, 0))), "minors do not matter");
        assert!(runs(V(12, 4), Some(V(13, 0))));
        assert!(runs(V(13, 0), None), "no driver: nothing to compare with");
        assert!(!runs(V(13, 0), Some(V(12, 9))));
        assert!(!runs(V(11, 8), Some(V(12, 2))));
        assert!(!runs(V(11, 8), None));
        assert!(driver_verdict(V(12, 0)).is_ok() && driver_verdict(V(13, 1)).is_ok());
        let why = driver_verdict(V(11, 8)).unwrap_err();
        assert!(
            why.contains("11.8") && why.contains("12.0") && !why.contains('\n'),
            "{why}"
        );
    }

    /// A complaint names both versions, the file, and the package that goes with the driver.
    #[test]
    fn complaints_name_versions_file_and_package() {
        let why = library_verdict(
            "/x/libnvrtc.so.13",
            (13, "13.0"),
            Some(V(12, 4)),
            Package::Nvrtc,
        )
        .unwrap_err();
        for word in [
            "/x/libnvrtc.so.13",
            "13.0",
            "12.4",
            "nvidia-cuda-nvrtc-cu12",
        ] {
            assert!(why.contains(word) && !why.contains('\n'), "{word}: {why}");
        }
        let why = architecture_complaint("/x/libnvrtc.so.12", V(12, 4), 120, Some(V(12, 8)));
        for word in [
            "/x/libnvrtc.so.12",
            "12.4",
            "sm_120",
            "12.8 or newer",
            "nvidia-cuda-nvrtc-cu12",
        ] {
            assert!(why.contains(word) && !why.contains('\n'), "{word}: {why}");
        }
    }

    #[test]
    fn packages_go_with_the_driver() {
        for (package, new, old) in [
            (
                Package::Nvrtc,
                "nvidia-cuda-nvrtc",
                "nvidia-cuda-nvrtc-cu12",
            ),
            (Package::Cublas, "nvidia-cublas", "nvidia-cublas-cu12"),
            (Package::Cudnn, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        ] {
            assert_eq!(package.name(None), new);
            assert_eq!(package.name(Some(V(13, 1))), new);
            assert_eq!(package.name(Some(V(12, 9))), old);
        }
    }

    /// Machine code runs on later cards of the same major number, never on earlier ones or others.
    #[test]
    fn a_card_runs_code_of_its_major_number() {
        let known = [50, 80, 86, 89, 90, 100, 120];
        for (card, want) in [
            (86, Some(86)),
            (87, Some(86)),
            (90, Some(90)),
            (103, Some(100)),
            (121, Some(120)),
        ] {
            assert_eq!(target(&known, card), want, "sm_{card}");
        }
        assert_eq!(target(&[80, 90], 120), None);
        assert_eq!(target(&[89, 90], 86), None, "code for later cards");
        assert_eq!(first_for(120), Some(V(12, 8)));
    }
}
