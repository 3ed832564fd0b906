# ruff: noqa: E501 - a sentence with all its choices stays on one line
"""Draw tasks for tools: what a user asks, the tool that fits, its call, its result, and the answer.

Names of tools and arguments vary as widely as possible, and values are often made-up words: the model has to learn to
copy them from the prompt, not to know them.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.lab.tiny_model import words
from kvmesh.lab.tiny_model.grammar import and_list, capitalized, expand

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
Argument = tuple[str, dict[str, JsonValue], JsonValue]  # (name, JSON schema, value; None: optional and left out)


@dataclass(frozen=True, slots=True)
class ToolTask:
    """Holds a question, the one call that answers it, and what follows."""

    tool: dict[str, JsonValue]  # as in `tools[].function` of a request
    asked: str
    arguments: dict[str, JsonValue]
    result: str
    answer: str
    purpose: str  # tools of one purpose are not offered together: either would be right


def same_purpose(one: str, other: str) -> bool:
    """Say whether tools of these purposes could answer the same question: a calculator can do any sum."""
    return one == other or (one[:3] == other[:3] == "sum" and "sum" in (one, other))


def compact(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- words that the prompt alone knows ------------------------------------------------------------------

_STARTS = [
    "b",
    "br",
    "c",
    "ch",
    "cl",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "pr",
    "qu",
    "r",
    "s",
    "sh",
    "sl",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "oo", "ou"]
_ENDS = ["", "", "", "l", "n", "r", "s", "t", "x", "m", "nd", "rt", "ck"]
CITIES = (
    "Paris", "London", "Tokyo", "Berlin", "Rome", "Madrid", "Oslo", "Vienna", "Cairo", "Athens", "Lisbon", "Beijing",
    "Nairobi", "Lima", "Ottawa", "Boston", "Chicago", "Seattle", "Denver", "Dublin", "Prague", "Warsaw", "Zurich",
    "Geneva", "Munich", "Hamburg", "Milan", "Naples", "Seoul", "Osaka", "Kyoto", "Delhi", "Mumbai", "Sydney",
    "Melbourne", "Toronto", "Montreal", "Helsinki", "Stockholm", "Copenhagen", "Brussels", "Amsterdam", "Istanbul",
    "Dubai", "Moscow", "Kyiv", "Budapest", "Singapore", "Bangkok", "Hanoi", "Manila", "Jakarta", "Lagos", "Accra",
    "Bogota", "Quito", "Santiago", "Havana", "Austin", "Dallas", "New York", "San Francisco", "Los Angeles",
    "New Delhi", "Cape Town", "Buenos Aires", "Hong Kong", "Tel Aviv",
)  # fmt: skip
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "cold", "warm", "hot", "dry")
TOPICS = (*words.ANIMALS, *words.FOODS, *words.COLOURS, *words.THINGS, *words.PLACES)


def made_up_word(rng: random.Random, syllables: int = 0) -> str:
    count = syllables or rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_STARTS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(count))


def a_word(rng: random.Random) -> str:
    return rng.choice(TOPICS) if rng.random() < 0.6 else made_up_word(rng)


def a_name(rng: random.Random) -> str:
    pool = words.NAMES_SHE + words.NAMES_HE
    return rng.choice(pool) if rng.random() < 0.6 else capitalized(made_up_word(rng, 2))


def a_city(rng: random.Random) -> str:
    city = rng.choice(CITIES) if rng.random() < 0.6 else capitalized(made_up_word(rng, rng.choice((2, 2, 3))))
    if rng.random() < 0.1:
        city += rng.choice((", France", ", Japan", ", CA", ", TX", ", Italy", ", Kenya", ", Spain", ", UK"))
    return city


def a_number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((9, 20, 99, 99, 999, 9999)))


def an_id(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(rng.choice((0, 1, 2, 3))))
    return letters + rng.choice(("", "-")) * bool(letters) + str(rng.randint(1, 99999))


def a_phrase(rng: random.Random) -> str:
    return " ".join(a_word(rng) for _ in range(rng.choice((1, 2, 2, 3, 4))))


def a_path(rng: random.Random) -> str:
    folders = [made_up_word(rng) if rng.random() < 0.5 else rng.choice(("src", "docs", "tmp", "data", "home", "notes")) for _ in range(rng.choice((0, 0, 1, 2)))]  # fmt: skip
    suffix = rng.choice((".txt", ".md", ".py", ".json", ".csv", ".log"))
    return rng.choice(("", "/", "./")) * bool(folders) + "/".join([*folders, a_word(rng) + suffix])


def a_date(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice((*words.DAYS, "today", "tomorrow"))
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def a_sentence(rng: random.Random) -> str:
    text = "{The [a] is {in|near|behind|under} the [b]|[n] {saw|found|lost|likes|bought} {a|the} [a]|There {is|was} a [a] {at|in|on} the [b]|The [a] {and the [b] are|is} {ready|gone|new|open|closed}|We {need|have|want} more [a]}."
    return capitalized(expand(rng, text, {"a": a_word(rng), "b": a_word(rng), "n": a_name(rng)}))


# --- names of tools and arguments -----------------------------------------------------------------------


def styled(rng: random.Random, parts: Sequence[str]) -> str:
    """Return the words as a name: mostly snake_case, also camelCase, with dashes or in one."""
    style = rng.random()
    if style < 0.62:
        return "_".join(parts)
    if style < 0.87:
        return parts[0] + "".join(capitalized(part) for part in parts[1:])
    return "-".join(parts) if style < 0.94 else "".join(parts)


def tool_name(rng: random.Random, choices: str) -> str:
    """Return one of the `|` separated choices of words as a name, sometimes with a word more."""
    parts = rng.choice(choices.split("|")).split()
    if rng.random() < 0.12:
        parts.append(rng.choice(("tool", "v2", "api", "now", "by id", "x", made_up_word(rng))).split()[0])
    if rng.random() < 0.06:
        parts.insert(0, made_up_word(rng))
    return styled(rng, parts)


def argument_name(rng: random.Random, choices: str) -> str:
    name = rng.choice(choices.split("|")) if rng.random() < 0.85 else made_up_word(rng)
    return styled(rng, name.split())


def function_tool(rng: random.Random, name: str, description: str, arguments: Sequence[Argument]) -> dict[str, JsonValue]:  # fmt: skip
    properties: dict[str, JsonValue] = {key: schema for key, schema, _ in arguments}
    required: list[JsonValue] = [key for key, _, value in arguments if value is not None]
    parameters: dict[str, JsonValue] = {"type": "object", "properties": properties, "required": required}
    tool: dict[str, JsonValue] = {"name": name, "parameters": parameters}
    return tool if rng.random() < 0.08 else tool | {"description": description}


def schema_of(value: JsonValue) -> dict[str, JsonValue]:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case list():
            return {"type": "array"}
    return {"type": "string"}


def argument(rng: random.Random, names: str, value: JsonValue) -> Argument:
    schema = schema_of(value)
    if isinstance(value, int) and rng.random() < 0.3:
        schema = {"type": "number"}
    return argument_name(rng, names), schema, value


def optional(rng: random.Random) -> list[Argument]:
    """Return no or one argument that the question does not speak of."""
    if rng.random() < 0.8:
        return []
    name, kind = rng.choice((("limit", "integer"), ("unit", "string"), ("language", "string"), ("verbose", "boolean"), ("page", "integer"), ("format", "string"), (made_up_word(rng), "string")))  # fmt: skip
    schema: dict[str, JsonValue] = {"type": kind}
    if name == "unit":
        schema["enum"] = ["celsius", "fahrenheit"]
    return [(name, schema, None)]


def task(
    rng: random.Random,
    purpose: str,
    name: str,
    description: str,
    arguments: Sequence[Argument],
    asked: str,
    result: str,
    answer: str,
) -> ToolTask:
    unique = {given[0]: given for given in (*arguments, *optional(rng))}
    tool = function_tool(rng, tool_name(rng, name), expand(rng, description), tuple(unique.values()))
    if rng.random() < 0.06:
        asked = expand(rng, "{Use|Call|Please use|Use the tool} ") + f" {tool['name']}: " + asked
    said: dict[str, JsonValue] = {key: value for key, _, value in unique.values() if value is not None}
    return ToolTask(tool, asked.replace("  ", " "), said, result, answer, purpose)


# --- what people ask tools for --------------------------------------------------------------------------


def weather(rng: random.Random, city: str = "") -> ToolTask:
    city = city or a_city(rng)
    degrees, condition = rng.randint(-15, 40), rng.choice(CONDITIONS)
    asked = expand(
        rng,
        "{What is the weather {|like }in [c]{| today| now| right now| tomorrow}?|How is the weather in [c]{| today}?|What's the weather {|like }in [c]{| today| tomorrow}?|{How warm|How cold|How hot} is it in [c]?|What is the {current |}temperature in [c]?|Is it {raining|warm|cold|sunny} in [c]?|Weather in [c]?|{Tell me|Get|Check|Show me} the weather {in|for} [c].|{I am going to [c]. |}{Will it rain in [c]?|Do I need an umbrella in [c]?}}",
        {"c": city},
    )
    unit: list[Argument] = []
    if rng.random() < 0.2:
        kinds: list[JsonValue] = list(
            rng.choice((("celsius", "fahrenheit"), ("fahrenheit", "celsius"), ("C", "F"), ("metric", "imperial")))
        )
        chosen = rng.choice((kinds[0], *kinds))  # without a word about it: the first
        asked = asked[:-1] + f" in {chosen}" + asked[-1] if chosen != kinds[0] or rng.random() < 0.5 else asked
        unit = [(rng.choice(("unit", "units")), {"type": "string", "enum": kinds}, chosen)]
    facts: dict[str, JsonValue] = {
        rng.choice(("temperature", "degrees", "temp", "temp_c")): degrees,
        rng.choice(("condition", "weather", "sky", "summary")): condition,
    }
    if rng.random() < 0.3:
        facts = {rng.choice(("city", "location")): city, **facts}
    result, answer = rng.choice((
        (compact(facts), expand(rng, f"{{The weather in [c] is {condition}, {degrees} degrees|In [c] it is {condition} and {degrees} degrees|It is {condition} in [c], with {degrees} degrees}}.", {"c": city})),
        (f"It is {condition} in {city}, {degrees} degrees.", f"It is {condition} in {city}, {degrees} degrees."),
        (f"It's always {condition} in {city}!", f"It is always {condition} in {city}!"),
        (condition, f"It is {condition} in {city}."),
        (f"{degrees}", f"It is {degrees} degrees in {city}."),
        (f"{degrees}°C, {condition}", f"In {city} it is {degrees}°C and {condition}."),
    ))  # fmt: skip
    return task(
        rng, "weather", "get weather|weather|get current weather|current weather|weather lookup|fetch weather|get forecast|forecast|get temperature|weather in city|check weather",
        "{Get|Return|Look up|Fetch|Find} the {current |}{weather|temperature|weather forecast} {in a city|for a place|of a given location|at a location}{.|}",
        [argument(rng, "city|location|place|town|city|location|city name|where|query", city), *unit], asked, result, answer,
    )  # fmt: skip


def local_time(rng: random.Random, city: str = "") -> ToolTask:
    city = city or a_city(rng)
    time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    asked = expand(
        rng,
        "{What time is it in [c]{| now}?|What is the time in [c]?|Tell me the time in [c].|How late is it in [c]?|{Get|Show me} the {current |local |}time in [c].}",
        {"c": city},
    )
    result = rng.choice((time, compact({"time": time}), compact({"city": city, "time": time}), f"{time} in {city}"))
    return task(
        rng, "time", "get time|get current time|current time|local time|time in city|clock|world clock|what time",
        "{Get|Return|Tell|Look up} the {current |local |}time {in a city|of a place|at a location}{.|}",
        [argument(rng, "city|location|place|timezone|zone|where", city)], asked, result, f"It is {time} in {city}.",
    )  # fmt: skip


_SUMS = (
    ("add|sum|plus|add numbers|add two numbers|calculator add", "{Add|Sum} two numbers", "+", "{What is [a] {plus|+} [b]?|Add [a] and [b].|How much is [a] {plus|+} [b]?|[a] + [b]?|What is the sum of [a] and [b]?|Calculate [a] + [b].}", "[a] plus [b] is"),
    ("subtract|minus|difference|sub", "Subtract {two numbers|one number from another}", "-", "{What is [a] {minus|-} [b]?|Subtract [b] from [a].|How much is [a] {minus|-} [b]?|Calculate [a] - [b].}", "[a] minus [b] is"),
    ("multiply|times|product|mul|multiply numbers", "Multiply two {numbers|integers}", "*", "{What is [a] {times|*|x|multiplied by} [b]?|Multiply [a] and [b].|Multiply [a] by [b].|How much is [a] {times|x} [b]?|Calculate [a] * [b].}", "[a] times [b] is"),
    ("divide|division|div|quotient", "Divide {two numbers|one number by another}", "/", "{What is [a] {divided by|/} [b]?|Divide [a] by [b].|Calculate [a] / [b].}", "[a] divided by [b] is"),
)  # fmt: skip


def sum_of_two(rng: random.Random) -> ToolTask:
    names, description, sign, asked, answer = rng.choice(_SUMS)
    purpose = f"sum {sign}"
    a, b = a_number(rng), a_number(rng) + (sign == "/")
    value = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / max(b, 1), 2)}[sign]
    slots = {"a": str(a), "b": str(b)}
    first, second = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2"), ("n", "m"), ("first number", "second number"), (made_up_word(rng), made_up_word(rng))))  # fmt: skip
    given: list[Argument] = [
        (styled(rng, first.split()), schema_of(a), a),
        (styled(rng, second.split()), schema_of(b), b),
    ]
    if rng.random() < 0.4:
        given = [(key, {"type": "number"}, number) for key, _, number in given]
    if rng.random() < 0.12:
        names, description = (
            "calculate|calculator|eval|evaluate expression|math|compute",
            "{Calculate|Evaluate} {an expression|a formula}",
        )
        purpose = "sum"
        given = [argument(rng, "expression|formula|input|query", f"{a} {sign} {b}")]
    result = rng.choice((str(value), str(value), compact({"result": value}), compact({"value": value})))
    return task(rng, purpose, names, description + "{.|}", given, expand(rng, asked, slots), result, expand(rng, answer, slots) + f" {value}.")  # fmt: skip


def search(rng: random.Random) -> ToolTask:
    query, found = a_phrase(rng), a_sentence(rng)
    where = rng.choice(("web", "docs", "notes", "library", "news", "books", "files", "products", "messages", "recipes"))
    asked = expand(
        rng,
        '{Search {for|the [w] for} [q].|Find [q]{| in the [w]}.|Look up [q]{| in the [w]}.|What {do you find|can you find} about [q]?|{Search|Look} for "[q]"{| in the [w]}.|Can you search {for|the [w] for} [q]?}',
        {"w": where, "q": query},
    )
    result = rng.choice(
        (found, compact([found]), compact({"results": [found]}), compact([{"title": query, "text": found}]))
    )
    return task(
        rng, "search", f"search|search {where}|{where} search|find|find {where}|lookup|query {where}|look up",
        f"{{Search|Search in|Look through}} the {where}{{.|}}",
        [argument(rng, "query|q|text|search query|keywords|term|question", query)], asked, result,
        rng.choice(("", "I found this: ", "Here is what I found: ")) + found,
    )  # fmt: skip


def file_task(rng: random.Random) -> ToolTask:
    path, text = a_path(rng), a_sentence(rng)
    key = "path|file|file path|filename|name|file name"
    kind = rng.random()
    if kind < 0.5:
        asked = expand(
            rng,
            "{Read {the file |}[p].|What is in {the file |}[p]?|Show me {the file |}[p].|Open [p].|What does [p] say?|Read the file [p] and tell me what it says.}",
            {"p": path},
        )
        answer = expand(rng, "{The file says: |In [p] I read: |[p] says: |}", {"p": path}) + " " + text
        return task(rng, "read", "read file|read|open file|cat|get file|view file|read text file|load file", "{Read|Open|Show} {a file|the contents of a file|the text of a file}{.|}", [argument(rng, key, path)], asked, text, answer.strip())  # fmt: skip
    if kind < 0.75:
        asked = expand(
            rng,
            '{Write "[t]" {to|into} [p].|Save "[t]" {in|to} the file [p].|Put the text "[t]" into [p].}',
            {"p": path, "t": text},
        )
        given = [argument(rng, key, path), argument(rng, "content|text|contents|data|body", text)]
        return task(rng, "write", "write file|write|save file|create file|save text|put file", "Write {text|something} to a file{.|}", given, asked, rng.choice(("ok", "done", "written", f"wrote {path}")), expand(rng, "{I wrote the text to [p]|The text is now in [p]|Done, I saved it in [p]}.", {"p": path}))  # fmt: skip
    asked = expand(rng, "{Delete|Remove|Please delete} {the file |}[p].", {"p": path})
    return task(rng, "delete", "delete file|remove file|rm|delete|unlink", "{Delete|Remove} a file{.|}", [argument(rng, key, path)], asked, rng.choice(("ok", "deleted", "true")), f"I deleted {path}.")  # fmt: skip


def message_task(rng: random.Random) -> ToolTask:
    name, text = a_name(rng), a_sentence(rng)
    to = name if rng.random() < 0.6 else f"{name.lower()}@{made_up_word(rng)}.{rng.choice(('com', 'org', 'net'))}"
    given = [argument(rng, "to|recipient|address|email|receiver|user", to)]
    given.append(argument(rng, "text|message|body|content|msg", text))
    asked = expand(
        rng,
        '{Send {an email|a message|a mail} to [n]{ that says|:|with the text} "[t]"|Write to [n]: "[t]"|Tell [n]: [t]|Message [n]: [t]|Send [n] the message "[t]"}',
        {"n": to, "t": text},
    )
    return task(
        rng, "message", "send email|send message|send mail|email|message|notify|send text|send sms|post message",
        "Send {an email|a message|a text} {|to someone|to a person}{.|}",
        given, asked, rng.choice(("sent", "ok", compact({"status": "sent"}), compact({"ok": True}))),
        expand(rng, "{I sent the message to [n]|The message to [n] is sent|Done, [n] has your message}.", {"n": to}),
    )  # fmt: skip


_VERBS = [
    "cancel",
    "open",
    "close",
    "start",
    "stop",
    "delete",
    "remove",
    "create",
    "update",
    "book",
    "order",
    "buy",
    "sell",
    "find",
    "get",
    "show",
    "list",
    "check",
    "track",
    "print",
    "rent",
    "copy",
    "move",
    "lock",
    "unlock",
    "approve",
    "reject",
    "assign",
    "count",
    "restart",
    "archive",
    "pause",
    "resume",
    "call",
    "invite",
    "ping",
    "block",
    "merge",
]
_NOUNS = [
    "order",
    "ticket",
    "user",
    "door",
    "window",
    "lamp",
    "job",
    "task",
    "meeting",
    "account",
    "invoice",
    "room",
    "car",
    "table",
    "flight",
    "train",
    "parcel",
    "server",
    "project",
    "report",
    "book",
    "song",
    "file",
    "item",
    "issue",
    "customer",
    "payment",
    "device",
    "printer",
    "folder",
    "event",
    "note",
    "table",
    "branch",
    "worker",
    "model",
    "player",
    "game",
    "route",
    "garden",
]
_ID_NAMES = "id|[n] id|number|[n] number|[n]|name|key|code|target"


def verb_and_noun(rng: random.Random) -> ToolTask:
    """Draw any verb with any noun: the tool is known by its words."""
    known = rng.random() < 0.75
    verb, noun = (rng.choice(_VERBS), rng.choice(_NOUNS)) if known else (made_up_word(rng), made_up_word(rng))
    value: JsonValue = rng.choice((an_id(rng), a_number(rng), a_name(rng), made_up_word(rng), a_word(rng)))
    shown = str(value)
    asked = expand(
        rng, "{|Please |Can you |I want to }[v] {|the }[n] {|number |with id |}[x]", {"v": verb, "n": noun, "x": shown}
    )
    asked = capitalized(asked) + ("?" if asked.startswith("Can") else rng.choice((".", ".", " now.", ", please.", "")))
    given = [argument(rng, _ID_NAMES.replace("[n]", noun), value)]
    result, answer = plain_result(rng, capitalized(noun), shown)
    return task(rng, f"{verb} {noun}", f"{verb} {noun}|{verb} {noun}|{noun} {verb}|{verb}", f"{capitalized(verb)} {{a|the|one}} {noun}{{.| by its id.| by number.|}}", given, asked, result, answer)  # fmt: skip


def plain_result(rng: random.Random, subject: str, value: str) -> tuple[str, str]:
    """Return a result and the answer that reports it."""
    state = rng.choice(("ok", "done", "ready", "closed", "open", "cancelled", "accepted", "running", "not found", "busy", "active", made_up_word(rng)))  # fmt: skip
    key, fact = rng.choice(("status", "state", "result", "message")), a_word(rng)
    if rng.random() < 0.08:
        return f"Error: {state} {fact}", f"Sorry, that did not work: {state} {fact}."
    return rng.choice((
        (f"{subject} {value}: {state}", f"{subject} {value}: {state}."),
        (f"{subject} {value} is {state}.", f"{subject} {value} is {state}."),
        (compact({key: state}), f"The {key} is {state}."),
        (compact({"id": value, key: state}), f"The {key} of {value} is {state}."),
        (compact({key: state, fact: len(state)}), f"The {key} is {state} and the {fact} is {len(state)}."),
        (state, expand(rng, "{The result is [s].|Result: [s].|The tool says: [s].}", {"s": state})),
        (str(len(value) * 7), f"The result is {len(value) * 7}."),
    ))  # fmt: skip


def named_arguments(rng: random.Random) -> ToolTask:
    """Draw any tool whose arguments the question names one by one."""
    verb, noun = rng.choice(("create", "add", "update", "book", "make", "set", "plan", made_up_word(rng))), rng.choice((*_NOUNS, made_up_word(rng)))  # fmt: skip
    pool = ["title", "name", "date", "count", "price", "color", "size", "owner", "label", "level", "priority", "due date", "user name", "amount", "urgent", "tags", made_up_word(rng), made_up_word(rng)]  # fmt: skip
    keys = rng.sample(pool, rng.choice((2, 2, 3)))
    given = [(styled(rng, key.split()), value) for key in keys for value in (value_for(rng, key),)]
    said = and_list([f"{key} {spoken(value)}" for key, (_, value) in zip(keys, given, strict=True)])
    asked = expand(rng, "{|Please }[v] {a|the} [n] with [s]", {"v": verb, "n": noun, "s": said})
    arguments: list[Argument] = [(key, schema_of(value), value) for key, value in given]
    rng.shuffle(arguments)
    result, answer = plain_result(rng, capitalized(noun), str(given[0][1]))
    return task(rng, f"{verb} {noun}", f"{verb} {noun}|{noun} {verb}|{verb} new {noun}", f"{capitalized(verb)} {{a|a new|the}} {noun}{{.|}}", arguments, capitalized(asked) + ".", result, answer)  # fmt: skip


def value_for(rng: random.Random, key: str) -> JsonValue:
    match key:
        case "date" | "due date":
            return a_date(rng)
        case "count" | "price" | "level" | "priority" | "amount" | "size":
            return a_number(rng)
        case "urgent":
            return rng.random() < 0.5
        case "tags":
            return [a_word(rng) for _ in range(rng.choice((1, 2, 3)))]
        case "owner" | "user name":
            return a_name(rng)
        case "title":
            return capitalized(a_phrase(rng))
    return a_word(rng)


def spoken(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return and_list([str(item) for item in value])
    return str(value)


def looked_up(rng: random.Random) -> ToolTask:
    """A fact about one thing: "What is the price of pears?"."""
    fact, thing = rng.choice(("price", "age", "size", "owner", "colour", "weight", "population", "status", "address", "length", "score", "capital", "height", "email", "salary", "stock price", "exchange rate", "definition")), rng.choice((a_word, a_name, a_city))(rng)  # fmt: skip
    value: JsonValue = rng.choice((a_number(rng), a_word(rng), a_name(rng), round(a_number(rng) / 7, 2)))
    asked = expand(
        rng,
        "{What is the [f] of [t]?|What's the [f] of [t]?|Tell me the [f] of [t].|{Get|Show|Look up|Find} the [f] of [t].|How {high|large|big} is the [f] of [t]?|[f] of [t]?}",
        {"f": fact, "t": thing},
    )
    result = rng.choice((str(value), str(value), compact({fact: value}), compact({"name": thing, fact: value})))
    return task(
        rng, fact, f"get {fact}|{fact} of|lookup {fact}|{fact}|fetch {fact}|find {fact}",
        f"{{Get|Return|Look up|Find}} the {fact} of {{something|a thing|a person|one item}}{{.|}}",
        [argument(rng, "name|thing|item|key|symbol|of|subject|person|id", thing)], capitalized(asked), result,
        f"The {fact} of {thing} is {value}.",
    )  # fmt: skip


def without_arguments(rng: random.Random) -> ToolTask:
    value = str(rng.choice((rng.randint(1, 6), a_name(rng), a_word(rng), a_date(rng))))
    what = rng.choice(("date", "user", "secret word", "magic number", "status", "version", "player name", "password", "list", "menu", "dice", "joke", "temperature", "queue", made_up_word(rng)))  # fmt: skip
    asked = expand(
        rng,
        "{What is the [w]{| now| today}?|{Tell|Show|Give} me the [w].|{Get|Fetch|Read} the [w].|I want to know the [w].|Do you know the [w]?}",
        {"w": what},
    )
    return task(rng, what, f"get {what}|{what}|read {what}|current {what}|fetch {what}|show {what}", f"{{Get|Return|Show|Tell}} the {{current |}}{what}{{.|}}", [], asked, rng.choice((value, compact({what.replace(' ', '_'): value}))), f"The {what} is {value}.")  # fmt: skip


def by_its_name(rng: random.Random) -> ToolTask:
    """A tool without meaning that the user names."""
    name, description = styled(rng, [made_up_word(rng) for _ in range(rng.choice((1, 2)))]), a_sentence(rng)
    value = rng.choice((a_number(rng), a_word(rng), a_name(rng)))
    given = [argument(rng, "x|value|input|text|n|arg|data|topic", value)]
    asked = expand(rng, "{Use [n] {with|for|on} [x]|Call [n] with [x]|Run [n] on [x]|Please {use|call} the tool [n] {with|for} [x]|Call the [n] tool with [x]}", {"n": name, "x": spoken(value)}) + "."  # fmt: skip
    result, answer = plain_result(rng, "Result", spoken(value))
    return ToolTask(function_tool(rng, name, description, given), asked, {given[0][0]: value}, result, answer, name)


KINDS: Mapping[str, tuple[Callable[[random.Random], ToolTask], int]] = {
    "weather": (weather, 5), "time": (local_time, 2), "sum": (sum_of_two, 4), "search": (search, 4),
    "file": (file_task, 3), "message": (message_task, 2), "verb and noun": (verb_and_noun, 5),
    "named arguments": (named_arguments, 4), "looked up": (looked_up, 4), "without arguments": (without_arguments, 2),
    "by its name": (by_its_name, 4),
}  # fmt: skip


def draw_kind(rng: random.Random) -> str:
    return rng.choices(tuple(KINDS), [weight for _, weight in KINDS.values()])[0]


def draw_task(rng: random.Random, kind: str = "") -> ToolTask:
    return KINDS[kind or draw_kind(rng)][0](rng)
