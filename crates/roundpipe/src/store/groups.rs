//! The groups of a store: given between steps, resolved to settings per parameter.

use super::{Store, StoredParam};
use crate::error::{Error, Result};
use crate::groups::{ParamGroup, ParamRule, ResolvedGroups, check_patterns, check_settings};
use crate::optim::{ParamSettings, Rule, check_moments, moments_of};
use crate::sync::lock;

impl Store {
    /// Replaces all groups, from the next step on. Steps that were requested before keep theirs.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a pattern that matches no trained parameter and for settings that the
    /// rule does not have or accept; the groups are as before then.
    pub fn set_groups(&self, groups: &[ParamGroup]) -> Result<()> {
        check_settings(groups, self.rule())?;
        check_patterns(groups, self.trained_names())?;
        let resolved = self.resolve(groups)?;
        self.check_kept_moments(&resolved)?;
        *lock(&self.shared.groups) = resolved;
        Ok(())
    }

    /// The settings that the next step has.
    pub fn groups(&self) -> ResolvedGroups {
        lock(&self.shared.groups).clone()
    }

    /// All names of trained parameters.
    pub(crate) fn trained_names(&self) -> impl Iterator<Item = &str> + Clone {
        self.params()
            .filter(|param| param.trainable)
            .map(|param| param.name.as_str())
    }

    /// Which rule updates each trained parameter in the next step, in model order; none without a
    /// rule.
    pub fn param_rules(&self) -> Vec<ParamRule> {
        let groups = self.groups();
        let own = self.layers().iter().flat_map(|layer| layer.own_trainable());
        let rules = own.filter_map(|(_, param)| {
            let settings = groups.of(param.home);
            Some(ParamRule {
                name: param.name.clone(),
                shape: param.shape,
                rule: settings.rule?.with(settings),
                lr_factor: settings.lr_factor,
                frozen: settings.frozen,
            })
        });
        rules.collect()
    }

    /// The settings of every parameter, its rule among them.
    pub(super) fn resolve(&self, groups: &[ParamGroup]) -> Result<ResolvedGroups> {
        let mut all = Vec::new();
        for layer in self.layers() {
            let mut settings = vec![ParamSettings::default(); layer.params().len()];
            for (index, param) in layer.own_trainable() {
                let names = self.names(param);
                let group = groups
                    .iter()
                    .find(|group| names.iter().any(|name| group.matches(name, &param.shape)));
                if let Some(group) = group {
                    settings[index] = group.settings();
                }
                let rule = match settings[index].rule {
                    Some(own) => Some(own.of_group_param(&param.shape)),
                    None => self
                        .rule()
                        .map(|rule| rule.of_param(names.into_iter(), &param.shape)),
                };
                if settings[index].betas.is_some() && matches!(rule, Some(Rule::Muon { .. })) {
                    let what = format!("{} is updated by Muon, which has no betas", param.name);
                    return Err(Error::config("groups", what));
                }
                settings[index].rule = rule;
                let config = &self.shared.config;
                let moments = match settings[index].moments {
                    Some(own) => own,
                    None => moments_of(&param.param, config.moments),
                };
                check_moments(moments, config.optim_dtype)?;
                settings[index].moments = Some(moments);
            }
            all.push(settings);
        }
        Ok(ResolvedGroups::new(all))
    }

    /// Every name of a parameter, by the layers that use it.
    fn names(&self, param: &StoredParam) -> Vec<&str> {
        let name =
            |&(layer, index): &(usize, usize)| self.layer(layer).params()[index].name.as_str();
        param.users.iter().map(name).collect()
    }

    /// Refuses another rule or type for moments that exist.
    fn check_kept_moments(&self, groups: &ResolvedGroups) -> Result<()> {
        let now = self.groups();
        for layer in self.layers().iter().filter(|layer| layer.has_moments()) {
            for (_, param) in layer.own_trainable() {
                let (was, is) = (now.of(param.home), groups.of(param.home));
                let (Some(old), Some(new)) = (was.rule, is.rule) else {
                    continue;
                };
                if was.moments != is.moments {
                    let what = format!(
                        "{} has moments already; give its group their type before training begins",
                        param.name
                    );
                    return Err(Error::config("groups", what));
                }
                let same = std::mem::discriminant(&old) == std::mem::discriminant(&new)
                    && old.moment_shapes(&param.shape) == new.moment_shapes(&param.shape);
                if !same {
                    let what = format!(
                        "{} has moments of {old}; give its group a rule before training begins",
                        param.name
                    );
                    return Err(Error::config("groups", what));
                }
            }
        }
        Ok(())
    }
}
