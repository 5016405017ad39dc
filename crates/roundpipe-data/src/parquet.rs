//! Parquet files as JSON lines in a scratch file.
//!
//! Columns are stored in groups of rows, so that a row cannot be read by itself. A table is written
//! once as lines, row by row, and then read like any file of lines. Only columns that formats know
//! are read: a table of pictures with captions costs its captions.
//!
//! The library that reads them trusts the sizes that a page states, so that a forged file can take up
//! to 2 GiB of memory for a moment; its panics become errors.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::Type;
use roundpipe_files::text::{one_line, shown};

use crate::error::{Error, Result};
use crate::format::KEYS;
use crate::storage::{Scratch, Storage, UNPACKED_BASE, UNPACKED_RATIO};

/// The rows of a table as lines.
pub(crate) fn to_lines(path: &Path, table: &Storage, folder: &Path) -> Result<Storage> {
    let limit = UNPACKED_BASE.saturating_add(table.bytes.saturating_mul(UNPACKED_RATIO));
    let mut scratch = Scratch::new(path, folder, limit)?;
    let write = AssertUnwindSafe(|| write_lines(path, table, &mut scratch));
    catch_unwind(write).unwrap_or_else(|_| Err(broken(path, "its pages contradict each other")))?;
    Ok(scratch.storage)
}

fn broken(path: &Path, why: &str) -> Error {
    let why = one_line(why);
    let what = format!("is no parquet file that can be read ({why}); fetch it again");
    Error::file(path, what)
}

fn write_lines(path: &Path, table: &Storage, scratch: &mut Scratch) -> Result<()> {
    let reader = SerializedFileReader::new(table.handle(path)?);
    let reader = reader.map_err(|e| broken(path, &e.to_string()))?;
    let schema = reader.metadata().file_metadata().schema();
    let columns = known_columns(path, schema)?;
    let rows = reader.get_row_iter(Some(columns));
    let rows = rows.map_err(|e| broken(path, &e.to_string()))?;
    for (number, row) in (1..).zip(rows) {
        let row = row.map_err(|e| Error::Row {
            path: path.to_path_buf(),
            row: number,
            what: format!(
                "cannot be read ({}); fetch the file again",
                one_line(&e.to_string())
            ),
        })?;
        let mut line = row.to_json_value().to_string();
        line.push('\n');
        scratch.append(line.as_bytes())?;
    }
    Ok(())
}

/// The part of a schema that formats know.
fn known_columns(path: &Path, schema: &Type) -> Result<Type> {
    let all = schema.get_fields();
    let is_known = |column: &&Arc<Type>| KEYS.contains(&column.name());
    let known: Vec<Arc<Type>> = all.iter().filter(is_known).cloned().collect();
    if known.is_empty() {
        let names: Vec<String> = all
            .iter()
            .take(8)
            .map(|column| shown(column.name()))
            .collect();
        let what = format!(
            "has the columns {}, which are no known format; name them as one of {}",
            names.join(", "),
            KEYS.join(", ")
        );
        return Err(Error::file(path, what));
    }
    let columns = Type::group_type_builder(schema.name())
        .with_fields(known)
        .build();
    columns.map_err(|e| broken(path, &e.to_string()))
}
