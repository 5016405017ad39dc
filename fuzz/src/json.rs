//! Changes of JSON trees.

use serde_json::{Map, Number, Value};

use super::mutate::Rng;

/// Numbers at which code that counts goes wrong.
pub const ODD_NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "16",
    "255",
    "256",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "-9223372036854775808",
    "0.5",
    "-0.0",
    "1e-300",
    "1e18",
    "1e300",
    "-1e300",
];

/// Deeper trees are not made: parsers refuse them at once.
const DEPTH: usize = 100;

/// Changes one place of a tree; `donor` is another tree to take from.
pub fn mutate(words: &[&str], rng: &mut Rng, tree: &mut Value, donor: Option<&Value>) {
    let source = donor.filter(|_| rng.one_in(3)).unwrap_or(tree);
    let piece = nth(source, &mut rng.below(count(source)))
        .cloned()
        .unwrap_or_default();
    let Some(place) = nth_mut(tree, &mut rng.below(count(tree))) else {
        return;
    };
    match rng.below(10) {
        0 => *place = scalar(words, rng),
        1 if height(&piece) < DEPTH / 2 => *place = piece,
        2 => wrap(words, rng, place),
        _ => match place {
            Value::Object(map) => mutate_map(words, rng, map, piece),
            Value::Array(items) => mutate_list(words, rng, items, piece),
            Value::String(text) => mutate_text(words, rng, text),
            Value::Number(number) => mutate_number(rng, number),
            _ => *place = scalar(words, rng),
        },
    }
}

fn scalar(words: &[&str], rng: &mut Rng) -> Value {
    match rng.below(8) {
        0 => Value::Null,
        1 => Value::Bool(rng.one_in(2)),
        2 => Value::Array(Vec::new()),
        3 => Value::Object(Map::new()),
        4 => Value::String(rng.pick(words).copied().unwrap_or("").to_owned()),
        5 => Value::String(String::new()),
        _ => odd_number(rng),
    }
}

fn odd_number(rng: &mut Rng) -> Value {
    let text = ODD_NUMBERS[rng.below(ODD_NUMBERS.len())];
    serde_json::from_str(text).unwrap_or_default()
}

fn wrap(words: &[&str], rng: &mut Rng, place: &mut Value) {
    if height(place) >= DEPTH / 2 {
        return;
    }
    let inner = place.take();
    *place = match rng.one_in(2) {
        true => Value::Array(vec![inner]),
        false => {
            let key = rng.pick(words).copied().unwrap_or("x").to_owned();
            Value::Object([(key, inner)].into_iter().collect())
        }
    };
}

fn mutate_map(words: &[&str], rng: &mut Rng, map: &mut Map<String, Value>, piece: Value) {
    let key = map.keys().nth(rng.below(map.len())).cloned();
    let word = rng.pick(words).copied().unwrap_or("x").to_owned();
    match (rng.below(4), key) {
        (0, Some(key)) => _ = map.shift_remove(&key),
        (1, Some(key)) => {
            let value = map.shift_remove(&key).unwrap_or_default();
            map.insert(word, value);
        }
        (2, Some(key)) => {
            let value = map[&key].clone();
            map.insert(word, value);
        }
        _ => {
            let value = if rng.one_in(2) {
                piece
            } else {
                scalar(words, rng)
            };
            map.insert(word, value);
        }
    }
}

fn mutate_list(words: &[&str], rng: &mut Rng, items: &mut Vec<Value>, piece: Value) {
    let at = rng.below(items.len());
    match rng.below(5) {
        0 if !items.is_empty() => _ = items.remove(at),
        1 if !items.is_empty() => items.insert(at, items[at].clone()),
        2 if !items.is_empty() => {
            let to = rng.below(items.len());
            items.swap(at, to);
        }
        3 if !items.is_empty() && items.len() < 64 => {
            let item = items[at].clone();
            items.extend(std::iter::repeat_n(item, 1 + rng.below(40)));
        }
        _ => items.push(if rng.one_in(2) {
            piece
        } else {
            scalar(words, rng)
        }),
    }
}

fn mutate_text(words: &[&str], rng: &mut Rng, text: &mut String) {
    let ends: Vec<usize> = text
        .char_indices()
        .map(|(i, _)| i)
        .chain([text.len()])
        .collect();
    let at = ends[rng.below(ends.len())];
    let odd = [
        '\u{0}', '\n', '"', '\\', '/', '.', ' ', 'a', 'é', '▁', 'Ġ', '\u{fffd}', '😀', '(', '*',
        '$',
    ];
    match rng.below(6) {
        0 => text.truncate(at),
        1 => *text = rng.pick(words).copied().unwrap_or("").to_owned(),
        2 => text.insert_str(at, rng.pick(words).copied().unwrap_or("")),
        3 if text.len() < 256 => text.insert_str(at, &text.clone()),
        4 if at < text.len() => _ = text.remove(at),
        _ => text.insert(at, odd[rng.below(odd.len())]),
    }
}

fn mutate_number(rng: &mut Rng, number: &mut Number) {
    let near = number.as_i64().map(|n| match rng.below(5) {
        0 => n.saturating_add(1),
        1 => n.saturating_sub(1),
        2 => n.saturating_mul(2),
        3 => n / 2,
        _ => n.saturating_neg(),
    });
    match (near, odd_number(rng)) {
        (Some(near), _) if !rng.one_in(3) => *number = near.into(),
        (_, Value::Number(odd)) => *number = odd,
        _ => {}
    }
}

fn children(tree: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match tree {
        Value::Object(map) => Box::new(map.values()),
        Value::Array(items) => Box::new(items.iter()),
        _ => Box::new(std::iter::empty()),
    }
}

/// Places of a tree.
fn count(tree: &Value) -> usize {
    1 + children(tree).map(count).sum::<usize>()
}

fn height(tree: &Value) -> usize {
    1 + children(tree).map(height).max().unwrap_or(0)
}

/// A place of a tree by its number; counts `left` down on the way.
fn nth<'a>(tree: &'a Value, left: &mut usize) -> Option<&'a Value> {
    if *left == 0 {
        return Some(tree);
    }
    *left -= 1;
    children(tree).find_map(|child| nth(child, left))
}

fn nth_mut<'a>(tree: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
    if *left == 0 {
        return Some(tree);
    }
    *left -= 1;
    match tree {
        Value::Object(map) => map.values_mut().find_map(|child| nth_mut(child, left)),
        Value::Array(items) => items.iter_mut().find_map(|child| nth_mut(child, left)),
        _ => None,
    }
}
