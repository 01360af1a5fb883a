//! Allocation strings: what is read, what is refused and where, and that printing loses nothing.

use proptest::prelude::*;
use tensor_offload::allocation::Mode;
use tensor_offload::error::AllocationError;
use tensor_offload::{Allocation, ByteSize, DeviceId, Error, ErrorKind};

fn parse(text: &str) -> Allocation {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refuse(text: &str) -> Error {
    text.parse::<Allocation>().expect_err(text)
}

/// What is wrong with the text.
fn fault(text: &str) -> AllocationError {
    match refuse(text) {
        Error::Allocation(fault) => *fault,
        other => panic!("{text}: {other}"),
    }
}

/// The part of the text that a syntax error points at.
fn pointed_at(text: &str) -> &str {
    match fault(text) {
        AllocationError::Syntax { span, text: whole, .. } => {
            assert_eq!(whole, text);
            &text[span]
        }
        other => panic!("{text}: {other}"),
    }
}

#[test]
fn strings_print_in_one_form() {
    for (text, printed, mode) in [
        ("cuda:0,50%;cpu,*", "cuda:0,50%;cpu,*", Mode::Ratio),
        (" CUDA:0 , 2.5GB ; cpu , * ; ", "cuda:0,2.5gb;cpu,*", Mode::Bytes),
        ("cuda:0,2gb;cpu,*#", "cuda:0,2gb;cpu,*", Mode::Bytes),
        ("cuda:0,2gb;;cpu,*;#;", "cuda:0,2gb;cpu,*", Mode::Bytes),
        ("{cuda:0,0.15;cpu,0.5}", "cuda:0,0.15;cpu,0.5", Mode::Fraction),
        ("{ cuda:0,.1;cpu,0.70; }", "cuda:0,0.1;cpu,0.7", Mode::Fraction),
        ("cuda:0,0.85,cpu,0.15", "cuda:0,0.85;cpu,0.15", Mode::Fraction),
        ("0.8", "0.8", Mode::Fraction),
        ("#cuda:0;1.1;cpu", "#cuda:0;1.1;cpu", Mode::Virtual),
        ("#cuda:1;2.0;cpu , cuda:0;", "#cuda:1;2;cpu,cuda:0", Mode::Virtual),
        ("cuda:0,50%;cpu,50%#cuda:0;4.0;cpu", "cuda:0,50%;cpu,50%#cuda:0;4;cpu", Mode::Ratio),
        ("{cuda:0,50%;cpu,50%}#cuda:0;4.0;cpu", "cuda:0,50%;cpu,50%#cuda:0;4;cpu", Mode::Ratio),
        ("{cuda:0,50%;cpu,50%#cuda:0;4.0;cpu}", "cuda:0,50%;cpu,50%#cuda:0;4;cpu", Mode::Ratio),
        ("cpu,5 GB *;cuda:0,0b", "cpu,5gb*;cuda:0,0b", Mode::Bytes),
        ("cuda:0,33.333333333333336 %;cpu,*", "cuda:0,33.333333333333336%;cpu,*", Mode::Ratio),
        ("tpu_v5:1,*", "tpu_v5:1,*", Mode::Bytes),
        ("mps,1;cpu,*", "mps,1;cpu,*", Mode::Fraction),
        ("{cpu,*# ; }", "cpu,*", Mode::Bytes),
        ("auto", "auto", Mode::Auto),
        ("{ AUTO ; }", "auto", Mode::Auto),
        (" Auto , RESERVE = 2 GB ;#", "auto,reserve=2gb", Mode::Auto),
        ("auto,reserve=0b", "auto,reserve=0b", Mode::Auto),
        ("auto,reserve=1.5gib#cuda:1;0;cpu", "auto,reserve=1.5gb#cuda:1;0;cpu", Mode::Auto),
    ] {
        let allocation = parse(text);
        assert_eq!((allocation.to_string().as_str(), allocation.mode()), (printed, mode), "{text}");
        assert_eq!(parse(printed), allocation, "{text}");
    }
    assert_eq!(parse("#cuda:1;2.0;cpu").compute(), Some(DeviceId::cuda(1)));
    assert_eq!(parse("cuda:1,2gb").compute(), None);
    assert_eq!(parse("auto#cuda:1;2.0;cpu").compute(), Some(DeviceId::cuda(1)));
    assert_eq!(parse("auto,reserve=2gb").reserve(), Some(ByteSize(2 << 30)));
    assert_eq!((parse("auto").reserve(), parse("cpu,*").reserve()), (None, None));
}

#[test]
fn case_2_errors_point_at_the_place() {
    for (text, part) in [
        ("", ""),
        (" ; # ", ""),
        ("#", ""),
        ("{}", "{}"),
        ("cuda:0;cpu", "cuda:0"),
        ("cuda:0,", ""),
        ("cuda:0, ;cpu,*", ""),
        ("cpu,*;cuda:0,2,5gb", "cuda:0,2,5gb"),
        ("cpu,*;gpu 0,2gb", "gpu 0"),
        ("cpu,*; cuda,2gb", "cuda"),
        ("cpu,*;cuda:0,1e1gb ", "1e1gb"),
        ("{cpu,*;cuda:0,1gb", "{cpu,*;cuda:0,1gb"),
        ("cpu,*}", "cpu,*}"),
        ("*", "*"),
        ("5gb", "5gb"),
        ("0.8;0.7", "0.7"),
        ("#cuda:0;1.1", "cuda:0;1.1"),
        ("#cuda:0;1.1gb;cpu", "1.1gb"),
        ("#cuda:0;99999999999;cpu", "99999999999"),
        ("#cuda:0;1.1;cpu,", ""),
        ("a#b#c", "a"),
        ("auto,", ""),
        ("auto,2gb", "2gb"),
        ("auto,reserve", "reserve"),
        ("auto,reserve=", ""),
        ("auto,reserve=2", "2"),
        ("auto, reserve = 1e1gb ", "1e1gb"),
        ("auto,reserve=1gb,reserve=2gb", "reserve=2gb"),
        ("auto,limit=1gb", "limit=1gb"),
        ("auto reserve=1gb", "auto reserve=1gb"),
        ("auto;cpu,*", "cpu,*"),
        ("cpu,*;auto", "cpu,*"),
        ("auto;auto", "auto"),
        ("autos,reserve=1gb", "autos"),
        ("auto#cuda:0;1.1", "cuda:0;1.1"),
    ] {
        assert_eq!(pointed_at(text), part, "{text}");
    }
    let AllocationError::Syntax { span, .. } = fault("cuda:0,") else { panic!("no syntax error") };
    assert_eq!(span, 7..7);
}

#[test]
fn case_4_numbers_are_read_whole_or_not_at_all() {
    for quota in [
        "1e1gb",
        "2.5.1gb",
        "-2gb",
        "+2gb",
        "nan",
        "inf",
        "NaN%",
        "infgb",
        "64000MiBGiB",
        "0x10gb",
        "5 g b",
        "5 0gb",
        "gb",
        "%",
        ".",
        ".%",
        "2",
        "1.01",
        "5",
        "50%%",
        "50%*",
        "0.5*",
        "**",
        "5gb**",
        "* *",
        "1gbit",
        "16777216tb",
        "1_000b",
        "٣gb",
        "1,5%",
        "99999999999999999999%",
        "0.00000000000000000000001%",
    ] {
        let text = format!("cuda:0,{quota};cpu,*");
        assert_eq!(refuse(&text).kind(), ErrorKind::Syntax, "{text}");
    }
    for unit in ["k", "kb", "kib", "m", "mb", "mib", "g", "gb", "gib", "t", "tb", "tib", "b"] {
        for word in [unit.to_owned(), unit.to_uppercase(), format!(" {unit}"), format!("{unit}*"), format!(" {unit} *")]
        {
            parse(&format!("cuda:0,1.5{word}"));
        }
    }
    assert_eq!(parse("cuda:0,.5gb"), parse("cuda:0,536870912b"));
    assert_eq!(parse("cuda:0,1.9999b"), parse("cuda:0,1b"));
}

#[test]
fn a_string_holds_one_mode_and_each_device_once() {
    for (text, kind, words) in [
        ("cuda:0,50%;cpu,2gb", ErrorKind::MixedModes, ["cuda:0,50%", "cpu,2gb"]),
        ("cuda:0,*;cuda:1,0.5;cpu,5gb*", ErrorKind::MultipleRemainders, ["cuda:0", "cpu"]),
        ("0.5;cpu,50%", ErrorKind::MixedModes, ["0.5", "cpu,50%"]),
        ("cuda:0,1gb;cuda:1,*;CUDA:0 , 2gb", ErrorKind::DuplicateDevice, ["cuda:0,1gb", "CUDA:0 , 2gb"]),
        ("cuda:0,0%;cpu,0%", ErrorKind::ZeroShare, ["cuda:0,0%", "cpu,0%"]),
        ("auto;cpu,50%", ErrorKind::MixedModes, ["auto", "cpu,50%"]),
        ("cuda:0,2gb;auto,reserve=1gb", ErrorKind::MixedModes, ["auto,reserve=1gb", "cuda:0,2gb"]),
        ("#cuda:0;1;cpu,CPU", ErrorKind::DuplicateDevice, ["`cpu`", "`CPU`"]),
    ] {
        let error = refuse(text);
        assert_eq!(error.kind(), kind, "{text}");
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    }
}

#[test]
fn an_allocation_serialises_as_its_string() {
    let allocation = parse("cuda:0,2.5gb;cpu,*");
    let json = serde_json::to_string(&allocation).unwrap();
    assert_eq!(json, "\"cuda:0,2.5gb;cpu,*\"");
    assert_eq!(serde_json::from_str::<Allocation>(&json).unwrap(), allocation);
    let error = serde_json::from_str::<Allocation>("\"cuda:0\"").unwrap_err();
    assert!(error.to_string().contains("DEVICE,QUOTA"), "{error}");
}

fn bytes_of_a_size() -> impl Strategy<Value = String> {
    let unit = prop::sample::select(vec!["b", "k", "kb", "kib", "m", "mb", "mib", "g", "gb", "gib", "t", "tb", "tib"]);
    (decimals(), unit).prop_map(|(n, unit)| format!("{n}{unit}"))
}

fn decimals() -> impl Strategy<Value = String> {
    prop_oneof!["[0-9]{1,6}", "[0-9]{0,4}\\.[0-9]{1,5}", "[0-9]{1,4}\\."]
}

/// Strings of the grammar, each device once.
fn allocations() -> impl Strategy<Value = String> {
    let bytes = bytes_of_a_size();
    let percent = decimals().prop_map(|n| format!("{n}%"));
    let fraction = prop_oneof!["0?\\.[0-9]{1,6}", Just("0".to_owned()), Just("1".to_owned()), Just("1.0".to_owned())];
    let quotas = prop_oneof![
        prop::collection::vec(bytes, 1..5),
        // A nonzero weight first, for a ratio of zeros is refused.
        prop::collection::vec(percent, 0..4).prop_map(|v| [vec!["7%".to_owned()], v].concat()),
        prop::collection::vec(fraction, 1..5),
    ];
    let devices = Just(vec!["cpu", "cuda:0", "cuda:1", "mps", "xpu:3"]).prop_shuffle();
    let virtual_vram = prop::option::of(decimals().prop_map(|n| format!("#cuda:9;{n};cpu,cuda:0")));
    let auto = prop::option::weighted(0.2, prop::option::of(bytes_of_a_size()));
    (devices, quotas, any::<bool>(), virtual_vram, auto).prop_map(|(devices, quotas, star, virtual_vram, auto)| {
        if let Some(reserve) = auto {
            let reserve = reserve.map_or(String::new(), |size| format!(",reserve={size}"));
            return format!("auto{reserve}") + &virtual_vram.unwrap_or_default();
        }

        let mut entries: Vec<String> = devices.iter().zip(&quotas).map(|(d, q)| format!("{d},{q}")).collect();
        if star {
            entries.insert(entries.len() / 2, "npu:1,*".to_owned());
        }
        entries.join(";") + &virtual_vram.unwrap_or_default()
    })
}

proptest! {
    #[test]
    fn display_parses_back(text in allocations()) {
        let allocation = parse(&text);
        prop_assert_eq!(&parse(&allocation.to_string()), &allocation);
    }

    #[test]
    fn letter_case_and_blanks_do_not_matter(text in allocations(), seed in any::<u64>()) {
        let mut state = seed;
        let mut coin = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 63 == 1
        };
        let mut noisy = String::from(if coin() { " " } else { "" });
        for c in text.chars() {
            let separator = [',', ';', '#', '*', '%', '='].contains(&c);
            if separator && coin() { noisy.push_str("  ") }
            noisy.push(if coin() { c.to_ascii_uppercase() } else { c });
            if separator && c != '%' && coin() { noisy.push('\t') }
        }
        prop_assert_eq!(parse(&noisy), parse(&text));
        prop_assert_eq!(parse(&format!("{{{text}}}")), parse(&text));
    }

    #[test]
    fn parsing_never_panics(text in "\\PC{0,40}") {
        let _ = text.parse::<Allocation>();
    }

    #[test]
    fn parsing_near_the_grammar_never_panics(text in "(auto,?)?[cudapmx:0-9.,;#*% {}gbGiB=reserv-]{0,40}") {
        if let Err(Error::Allocation(fault)) = text.parse::<Allocation>()
            && let AllocationError::Syntax { span, text: whole, .. } = *fault
        {
            prop_assert!(whole.get(span).is_some());
        }
    }
}
