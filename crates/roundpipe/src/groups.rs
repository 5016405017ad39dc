//! Parameter groups: settings of the rule that hold for some of the parameters.
//!
//! A group says which parameters it means, by a name pattern or a predicate, and what is different
//! for them. A store resolves its groups once, into settings per parameter; an update asks neither
//! a pattern nor a closure, and each parameter is still one fused pass.
//!
//! Refused: a pattern that matches no trained parameter, a setting that the rule does not have, one
//! that it does not accept, and another rule or type for moments that exist.
//!
//! # Invariants
//! - The first group that matches a parameter decides alone; without one the rule's own settings
//!   hold.
//! - A parameter that several layers share matches by the name in any of them, and has one group.

use std::fmt;
use std::sync::Arc;

use roundpipe_tensor::Shape;

use crate::error::{Error, Result};
use crate::optim::{MomentType, ParamSettings, Rule};

/// Which parameters a group means, by full dotted name and sizes.
type Predicate = dyn Fn(&str, &Shape) -> bool + Send + Sync;

/// Some parameters, and the settings that differ for them. The first group that matches a parameter
/// decides alone.
///
/// ```
/// use roundpipe::ParamGroup;
///
/// let groups = [
///     ParamGroup::matching("embed.*").lr_factor(0.1).weight_decay(0.0),
///     ParamGroup::filter(|_, shape| shape.rank() < 2).weight_decay(0.0), // biases and norms
/// ];
/// # let _ = groups;
/// ```
#[derive(Clone)]
pub struct ParamGroup {
    selection: Selection,
    settings: ParamSettings,
}

#[derive(Clone)]
enum Selection {
    Pattern(String),
    Predicate(Arc<Predicate>),
}

impl ParamGroup {
    /// The parameters whose full dotted name matches `pattern`, in which `*` stands for any
    /// characters, dots included: `"*.bias"`, `"*norm*"`. A pattern that matches no trained
    /// parameter is refused where the group is given.
    pub fn matching(pattern: impl Into<String>) -> Self {
        Self::new(Selection::Pattern(pattern.into()))
    }

    /// The parameters for which `predicate` is true, given the full dotted name and the sizes. It
    /// is called when the group is given, not in updates, and may match nothing.
    pub fn filter(predicate: impl Fn(&str, &Shape) -> bool + Send + Sync + 'static) -> Self {
        Self::new(Selection::Predicate(Arc::new(predicate)))
    }

    fn new(selection: Selection) -> Self {
        Self {
            selection,
            settings: ParamSettings::default(),
        }
    }

    /// The rule, instead of the engine's. Its moments are made when training begins, so it cannot
    /// change after that. [`Rule::Muon`] means all matrices of the group, whatever their names.
    ///
    /// ```
    /// use roundpipe::ParamGroup;
    /// use roundpipe::optim::AdamW;
    ///
    /// // For an engine whose rule is Muon: an embedding that does not look like one by its name.
    /// let table = ParamGroup::matching("0.weight").rule(AdamW::default());
    /// # let _ = table;
    /// ```
    #[must_use]
    pub fn rule(mut self, rule: impl Into<Rule>) -> Self {
        self.settings.rule = Some(rule.into());
        self
    }

    /// What each update's learning rate is multiplied with; at least 0.
    #[must_use]
    pub fn lr_factor(mut self, factor: f64) -> Self {
        self.settings.lr_factor = factor;
        self
    }

    /// The weight decay, instead of the rule's.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.settings.weight_decay = Some(weight_decay);
        self
    }

    /// The decays of the moments, instead of the rule's.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.settings.betas = Some((beta1, beta2));
        self
    }

    /// In what moments are kept, instead of [`Builder::moments`](crate::Builder::moments), which
    /// leaves those of embeddings in f32 where others have 8 bits. They are made when training
    /// begins, so this cannot change after that.
    #[must_use]
    pub fn moments(mut self, moments: MomentType) -> Self {
        self.settings.moments = Some(moments);
        self
    }

    /// Whether weights and moments stay as they are. Gradients are computed, but count neither for
    /// the norm nor as steps of the parameter. A parameter that is not trainable when the engine is
    /// built ([`Param::set_trainable`](crate::Param::set_trainable)) saves their time and memory too.
    #[must_use]
    pub fn frozen(mut self, frozen: bool) -> Self {
        self.settings.frozen = frozen;
        self
    }

    /// The same group for parameters that go by other names elsewhere: `full_name` gives those that
    /// the group was made for. The result is a predicate, which may match nothing.
    pub(crate) fn renamed(
        &self,
        full_name: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> Self {
        let original = self.clone();
        let mut renamed =
            Self::filter(move |name, shape| original.matches(&full_name(name), shape));
        renamed.settings = self.settings;
        renamed
    }

    /// What differs for its parameters.
    pub(crate) fn settings(&self) -> ParamSettings {
        self.settings
    }

    /// Whether it means a parameter.
    pub(crate) fn matches(&self, name: &str, shape: &Shape) -> bool {
        match &self.selection {
            Selection::Pattern(pattern) => pattern_matches(pattern, name),
            Selection::Predicate(predicate) => predicate(name, shape),
        }
    }
}

impl fmt::Debug for ParamGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let selection = match &self.selection {
            Selection::Pattern(pattern) => pattern,
            Selection::Predicate(_) => "predicate",
        };
        f.debug_struct("ParamGroup")
            .field("selection", &selection)
            .field("settings", &self.settings)
            .finish()
    }
}

/// Whether `name` is `pattern` with something, or nothing, for each `*`.
fn pattern_matches(pattern: &str, name: &str) -> bool {
    let Some((prefix, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(prefix) else {
        return false;
    };
    let (middle, suffix) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        // The leftmost place leaves the most for the parts behind it.
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(suffix)
}

/// The settings of every parameter, by layer and index in it; none without groups. Cheap to clone,
/// so that a step takes along those that held when it was requested.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ResolvedGroups(Arc<Vec<Vec<ParamSettings>>>);

impl ResolvedGroups {
    pub(crate) fn new(settings: Vec<Vec<ParamSettings>>) -> Self {
        Self(Arc::new(settings))
    }

    /// The largest factor of a learning rate, at least 1.
    pub(crate) fn largest_lr_factor(&self) -> f64 {
        let settings = self.0.iter().flatten();
        settings.map(|one| one.lr_factor).fold(1.0, f64::max)
    }

    /// The settings of a parameter in its home layer.
    pub(crate) fn of(&self, (layer, index): (usize, usize)) -> ParamSettings {
        let settings = self.0.get(layer).and_then(|layer| layer.get(index));
        settings.copied().unwrap_or_default()
    }
}

/// Which rule updates a parameter, and with what.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamRule {
    /// Full dotted name.
    pub name: String,
    /// Sizes.
    pub shape: Shape,
    /// The rule with the settings of the parameter's group.
    pub rule: Rule,
    /// What each update's learning rate is multiplied with.
    pub lr_factor: f64,
    /// Whether a group freezes it.
    pub frozen: bool,
}

/// One line: `3.mlp.up.weight [128, 64]: Muon, lr x 0.5`.
impl fmt::Display for ParamRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", self.name, self.shape)?;
        if self.frozen {
            return f.write_str("frozen");
        }
        write!(f, "{}", self.rule)?;
        if self.lr_factor != 1.0 {
            write!(f, ", lr x {}", self.lr_factor)?;
        }
        Ok(())
    }
}

/// Refuses patterns that match none of `names`.
pub(crate) fn check_patterns<'a>(
    groups: &[ParamGroup],
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<()> {
    for group in groups {
        let Selection::Pattern(pattern) = &group.selection else {
            continue;
        };
        if names.clone().any(|name| pattern_matches(pattern, name)) {
            continue;
        }
        let example = match names.clone().next() {
            Some(first) => format!("the first trained one is \"{first}\""),
            None => "nothing is trained".to_owned(),
        };
        let what = format!("\"{pattern}\" matches no parameter; {example}");
        return Err(Error::config("groups", what));
    }
    Ok(())
}

/// Refuses settings that the rule does not have or does not accept.
pub(crate) fn check_settings(groups: &[ParamGroup], rule: Option<Rule>) -> Result<()> {
    if groups.is_empty() {
        return Ok(());
    }
    let Some(rule) = rule else {
        let what = "there is no rule for them to change; give the builder an optimizer";
        return Err(Error::config("groups", what));
    };
    for (index, group) in groups.iter().enumerate() {
        let settings = group.settings;
        let refuse = |what: String| {
            let name = match &group.selection {
                Selection::Pattern(pattern) => format!("\"{pattern}\""),
                Selection::Predicate(_) => format!("group {index}"),
            };
            Err(Error::config("groups", format!("{name}: {what}")))
        };
        let factor = settings.lr_factor;
        if !factor.is_finite() || factor < 0.0 {
            return refuse(format!(
                "lr_factor is {factor}, it must be finite and at least 0"
            ));
        }
        let rule = settings.rule.unwrap_or(rule);
        if settings.betas.is_some() && matches!(rule, Rule::Sgd(_) | Rule::Adafactor(_)) {
            return refuse(format!("the rule is {rule}, which has no betas"));
        }
        if let Err(error) = rule.with(settings).check_settings() {
            return refuse(error.to_string());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::pattern_matches;

    /// A star is any run of characters, also none; everything else is itself.
    #[test]
    fn patterns_match_as_globs_do() {
        let right = [
            ("*", ""),
            ("*", "0.weight"),
            ("0.weight", "0.weight"),
            ("*.bias", "3.mlp.up.bias"),
            ("*norm*", "norm"),
            ("*norm*", "3.input_norm.weight"),
            ("3.*.bias", "3.mlp.up.bias"),
            ("a*b*a", "aba"),
            ("a**a", "aa"),
            ("*ab*ab", "abab"),
            ("*ab*ab", "xabyabab"),
        ];
        for (pattern, name) in right {
            assert!(pattern_matches(pattern, name), "{pattern} and {name}");
        }
        let wrong = [
            ("", "0.weight"),
            ("0.weigh", "0.weight"),
            ("*.bias", "bias"),
            ("*.bias", "3.bias.weight"),
            ("*norm*", "nor.m"),
            ("a*a", "a"),
            ("*ab*ab", "ab"),
            ("*.BIAS", "3.bias"),
        ];
        for (pattern, name) in wrong {
            assert!(!pattern_matches(pattern, name), "{pattern} and {name}");
        }
    }
}
