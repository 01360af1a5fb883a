//! The list of cases that users met (`data/cases.json`) against the tests: each case is held by tests that exist, and each
//! test that is named after a case is in the list.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// What happened to users of such tools, and what has to happen here.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    number: u32,
    story: String,
    /// Public repositories where it was met, `owner/name`, with the number of the report where there is one.
    sources: Vec<String>,
    expected: String,
    /// The tests that hold it, `file::function`; those of a folder by the folder's name.
    tests: Vec<String>,
    /// What of it is not here, and so is not tested.
    #[serde(default)]
    absent: Option<String>,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("data/cases.json")).unwrap()
}

/// The functions of a source that stand under `#[test]`, with other attributes between the two.
fn tests_of(source: &str) -> BTreeSet<&str> {
    let mut lines = source.lines().map(str::trim);
    let mut found = BTreeSet::new();
    while lines.by_ref().any(|line| line == "#[test]") {
        let name = |line: &'_ str| line.strip_prefix("fn ").is_some();
        let function = lines.by_ref().find(|line| name(line)).expect("a function under `#[test]`");
        found.insert(function["fn ".len()..].split('(').next().unwrap());
    }
    found
}

/// All integration tests, by the name of their binary and their own.
fn all_tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut add = |binary: &str, path: &Path| {
        let source = fs::read_to_string(path).unwrap();
        found.extend(tests_of(&source).into_iter().map(|test| format!("{binary}::{test}")));
    };
    let sources = |folder: &Path| -> Vec<_> {
        let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
    };
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for path in sources(&tests) {
        add(path.file_stem().unwrap().to_str().unwrap(), &path);
    }
    for path in sources(&tests.join("plan")) {
        add("plan", &path);
    }
    found
}

/// The number in `case_N_…` and `cuda_case_N_…`.
fn number_in(test: &str) -> Option<u32> {
    let name = test.rsplit("::").next()?;
    let number = name.strip_prefix("cuda_").unwrap_or(name).strip_prefix("case_")?.split('_').next()?;
    Some(number.parse().unwrap_or_else(|_| panic!("{test} is named after a case without a number")))
}

#[test]
fn every_case_is_told_and_held_by_tests_that_exist() {
    let (cases, tests) = (cases(), all_tests());
    assert!(tests.len() > 300, "{} tests found", tests.len());
    assert_eq!(cases.iter().map(|case| case.number).collect::<Vec<_>>(), (1..=31).collect::<Vec<_>>());
    for case in &cases {
        let number = case.number;
        assert!(!case.story.is_empty() && !case.expected.is_empty() && !case.tests.is_empty(), "case {number}");
        assert!(case.absent.as_ref().is_none_or(|absent| !absent.is_empty()), "case {number}");
        let unknown: Vec<_> = case.tests.iter().filter(|test| !tests.contains(*test)).collect();
        assert!(unknown.is_empty(), "case {number} names tests that do not exist: {unknown:?}");
        assert_eq!(case.tests.iter().collect::<BTreeSet<_>>().len(), case.tests.len(), "case {number} names one twice");
        for source in &case.sources {
            let (repository, report) = source.split_once('#').map_or((&**source, None), |(at, n)| (at, Some(n)));
            assert_eq!(repository.split('/').filter(|part| !part.is_empty()).count(), 2, "case {number}: {source}");
            assert!(report.is_none_or(|number| number.parse::<u32>().is_ok()), "case {number}: {source}");
        }
    }
}

#[test]
fn every_test_named_after_a_case_is_in_its_list() {
    let listed: BTreeMap<u32, Vec<String>> = cases().into_iter().map(|case| (case.number, case.tests)).collect();
    let named: Vec<_> = all_tests().into_iter().filter_map(|test| Some((number_in(&test)?, test))).collect();
    assert!(named.len() > 40, "{} tests are named after a case", named.len());
    let missing: Vec<_> = named.iter().filter(|(n, test)| !listed.get(n).is_some_and(|l| l.contains(test))).collect();
    assert!(missing.is_empty(), "not in the list under their number: {missing:?}");
}
