//! Faults of weights in DFloat11's form.

use crate::dtype::DType;

/// What is wrong with a group of weights that a file has in DFloat11's form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DFloat11Fault {
    /// Nothing says which weights the group has.
    #[error(
        "it is in DFloat11's form, and no config.json with a `dfloat11_config` is beside the file to say which weights it has"
    )]
    NoConfig,
    /// The configuration says it of other groups only.
    #[error("it is in DFloat11's form, and no pattern in the `dfloat11_config` of config.json is of it")]
    NoPattern,
    /// A tensor that belongs to the form is missing.
    #[error("it is in DFloat11's form, and the file has no `{name}`")]
    NoPart {
        /// The missing tensor.
        name: String,
    },
    /// A tensor that belongs to the form is of another type or shape.
    #[error("it is part of a group in DFloat11's form and has to be {expected}, not {dtype} {shape:?}")]
    OtherPart {
        /// What it should be.
        expected: &'static str,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The group has not as many weights as the configuration names.
    #[error("the `dfloat11_config` of config.json names {named} of its modules, and it has the weights of {found}")]
    Modules {
        /// The modules in the configuration.
        named: u64,
        /// Those in the file.
        found: u64,
    },
    /// The modules' weights do not follow each other.
    #[error("its modules are split at {position}, which is not between {least} and {weights}")]
    Splits {
        /// The position.
        position: i64,
        /// The position before it.
        least: u64,
        /// The weights of the group.
        weights: u64,
    },
    /// Nothing says the weight's shape.
    #[error(
        "nothing says how many rows its {weights} elements have: DFloat11's form has no shapes, it has no bias in the file, and \
         config.json has no `hidden_size`, or says nothing of weights of this name"
    )]
    NoShape {
        /// The elements of the weight.
        weights: u64,
    },
    /// The weight has not as many elements as its shape.
    #[error("its {weights} elements are not those of {}", size(*rows, *columns))]
    OtherShape {
        /// The elements of the weight.
        weights: u64,
        /// The rows, by its bias or by config.json.
        rows: Option<u64>,
        /// The columns, by config.json.
        columns: Option<u64>,
    },
}

fn size(rows: Option<u64>, columns: Option<u64>) -> String {
    match (rows, columns) {
        (Some(rows), Some(columns)) => format!("{rows} rows of {columns}, as config.json has it"),
        (Some(rows), None) => format!("{rows} rows"),
        (None, Some(columns)) => format!("rows of {columns}"),
        (None, None) => "any shape".to_owned(),
    }
}
