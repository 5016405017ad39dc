//! The groups of a store: given between steps, resolved to settings per parameter.

use super::Store;
use crate::error::Result;
use crate::groups::{ParamGroup, ResolvedGroups, check_patterns, check_settings};
use crate::optim::ParamSettings;
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
        let resolved = match groups {
            [] => ResolvedGroups::default(),
            _ => self.resolve(groups),
        };
        *lock(&self.groups) = resolved;
        Ok(())
    }

    /// The settings that the next step has.
    pub fn groups(&self) -> ResolvedGroups {
        lock(&self.groups).clone()
    }

    /// All names of trained parameters.
    pub(crate) fn trained_names(&self) -> impl Iterator<Item = &str> + Clone {
        self.params()
            .filter(|param| param.trainable)
            .map(|param| param.name.as_str())
    }

    fn resolve(&self, groups: &[ParamGroup]) -> ResolvedGroups {
        let mut all = Vec::new();
        for layer in self.layers() {
            let mut settings = vec![ParamSettings::default(); layer.params().len()];
            for (index, param) in layer.own_trainable() {
                let names = param
                    .users
                    .iter()
                    .map(|&(layer, index)| self.layer(layer).params()[index].name.as_str());
                let group = groups
                    .iter()
                    .find(|group| names.clone().any(|name| group.matches(name, &param.shape)));
                if let Some(group) = group {
                    settings[index] = group.settings();
                }
            }
            all.push(settings);
        }
        ResolvedGroups::new(all)
    }
}
