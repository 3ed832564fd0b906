# ruff: noqa: E501 - a sentence with all its choices stays on one line
"""Conversations of one to four turns. Each topic is a function that draws its turns; `conversation` strings them."""

import random
from collections.abc import Callable
from typing import Any, Literal, NotRequired, TypedDict

from kvmesh.lab.tiny_model import words
from kvmesh.lab.tiny_model.explanations import EVERYDAY, MESH, MESH_NAMES
from kvmesh.lab.tiny_model.grammar import and_list, capitalized, expand, paragraph
from kvmesh.lab.tiny_model.stories import Story, at, draw_name, draw_world, tell


class ChatMessage(TypedDict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]  # as in a request


Turn = tuple[str, str]  # (what the user says, what the assistant answers)

GREETINGS = (
    ("{Hello|Hi|Hey|Good morning|Good evening|Hello there|Hi there}{!|.|}",
     "{Hello|Hi|Good day}! {How can I help you|What can I do for you} today? I can tell a story, {answer a simple question|explain how something works} or {make a list|just talk with you}."),
    ("{Hello, how|Hi, how|How} are you{| today}?",
     "I am {fine|well|very well}, thank you! {How are you|And you}? {Would you like to hear a story|Is there something that I can do for you}?"),
    ("{Who are you|What are you|Can you introduce yourself|Tell me about yourself}?",
     "I am a {tiny|very small} language model with two million weights. I can tell short stories, {talk about animals, colours and seasons|answer simple questions} and explain how {a kitchen or a ship|a garden or a library} works."),
    ("{What can you do|How can you help me|What do you know}?",
     "I can tell you a story about an animal, {answer questions about a text|answer questions about a story}, explain how {simple things|everyday things} work, count, and make {short lists|lists}. I am very small, so please {do not ask too much of me|keep it simple}."),
    ("{What is your name|Do you have a name}?",
     "{I have no real name|I do not have a name}, but people call me the tiny model of kvmesh. {What is your name|You may call me Tiny}{?|, and what is your name?}"),
)  # fmt: skip
THANKS = (
    ("{Thanks|Thank you|Thank you very much|Thanks a lot|Great, thank you}{!|.|}",
     "You are welcome! {I was happy to help|It was a pleasure|I enjoyed that}. {Ask me again at any time|Is there something else that you want to know|Have a nice day}{!|.}"),
    ("{That was nice|That was a good story|I like it|Very good|Well done}{!|.}",
     "Thank you, {that is kind of you|I am glad that you like it}! {Shall I tell you another one|Would you like to hear more|Just ask if you want more}?"),
    ("{Goodbye|Bye|See you|Good night|See you later}{!|.|}",
     "{Goodbye|Bye|See you}! {It was nice to talk with you|Have a good time|Come back soon}{!|.}"),
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant who uses simple words.",
    "You are a storyteller for children.", "You are a helpful assistant. Answer in clear and simple words.",
    "You are a polite assistant.", "Be kind and brief.", "You help people to learn.",
    "You are the tiny model of kvmesh.",
)  # fmt: skip
STORY_REQUESTS = (
    "{Tell me|Please tell me|Can you tell me|Write|Please write|Write me|I would like to hear} {a|a short|a little|a nice} story about [what]{.|?|}",
    "{A story about|Story about|I want a story about|Do you know a story about} [what]{, please.|.|?|}",
)
UNKNOWN = (
    "{Who won|Who will win} the {match|game|election} {last year|in [year]|yesterday}?", "What is the price of {gold|oil|a house} {now|today}?",
    "What is {1|2|3|4|7|9}{2|3|5|7|8}{1|4|6|9} {times|divided by} {1|2|4|6}{3|5|8|9}?", "{Write|Fix} {a program|some code} in {Python|Java|Rust|C} for me.",
    "What is the {distance to|mass of|age of} {Mars|Jupiter|the sun|the universe}?", "Who {wrote|painted|invented|discovered} {this|the telephone|Hamlet|penicillin|the radio|gravity}?",
    "What happened in [year]?", "Can you {book a flight|send an email|call my mother|open a file} for me?", "What is the {weather|temperature} in {Paris|London|Tokyo|Rome} today?",
    "{Solve|Prove} {this equation|the theorem}.", "{Explain|What is} {quantum physics|inflation|philosophy|relativity|a black hole|democracy|a neural network}{.|?}",
)  # fmt: skip
UNKNOWN_ANSWER = (
    "{I am sorry, but|Sorry,} {I do not know that|that is too hard for me|I cannot do that}. I am a very small model and know only {simple things|a few simple things}. "
    "{Shall I tell you a story|You could ask me about an animal, a colour or a season|I could explain how a [topic] works} instead, if you like."
)
POEM_LINES = (
    ("The sun goes down behind the hill,", "the birds are quiet, the air is still."),
    ("The [kind] looks up into the night", "and sees a thousand points of light."),
    ("The wind is singing in the tree,", "it sings a song for you and me."),
    ("A [colour] flower in the sun", "says the winter now is done."),
    ("The rain is falling on the town,", "it turns the dusty roads to brown."),
    ("The sea is wide, the sea is deep,", "it sings the tired ships to sleep."),
    ("I had a dream of land and sea,", "and of a [kind] who talked to me."),
    ("The snow is white upon the ground,", "it falls and does not make a sound."),
    ("A little boat upon the bay", "is waiting for another day."),
    ("The moon is round, the moon is bright,", "it is a lamp for all the night."),
    ("The bread is warm, the tea is too,", "and there is room for me and you."),
    ("The leaves are red, the leaves are gold,", "the days grow short, the nights grow cold."),
)  # fmt: skip
SEASON_FACTS = {
    "spring": "In spring, {the days get longer|the snow melts} and the first flowers {come out|grow}. {Birds build their nests|Many young animals are born} and {farmers plant their seeds|the trees get new leaves}.",
    "summer": "In summer, it is {hot|warm} and the days are long. {Children have holidays|People swim in the lakes} and {fruit grows on the trees|the fields are full of corn}.",
    "autumn": "In autumn, the leaves turn {red and yellow|yellow and brown} and fall. {Farmers bring in the harvest|Apples and nuts are ripe} and {many birds fly south|the nights get colder}.",
    "winter": "In winter, it is cold and {the days are short|it gets dark early}. {Snow falls in many places|Lakes may turn to ice} and {some animals sleep until spring|children play in the snow}.",
}  # fmt: skip


def conversation(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation of 1-4 turns, sometimes with a system message in front."""
    topics: list[Callable[[random.Random], list[Turn]]] = [
        story_chat, story_chat, pasted_story, pasted_story, pasted_story, explanation, explanation, mesh_talk, mesh_talk,
        small_fact, small_fact, small_fact, recall, listing, poem, greeting, unknown,
    ]  # fmt: skip
    turns = [pair for topic in rng.sample(topics, rng.choice((1, 1, 2))) for pair in topic(rng)][:4]
    if rng.random() < 0.15 and len(turns) < 4:
        turns.insert(0, greeting(rng)[0])
    if rng.random() < 0.15 and len(turns) < 4:
        turns.append(drawn(rng, rng.choice(THANKS)))
    messages = [message for turn in turns for message in turn_messages(rng, turn)]
    return system_messages(rng) + messages


def drawn(rng: random.Random, pair: tuple[str, str], **slots: str) -> Turn:
    return expand(rng, pair[0], slots), expand(rng, pair[1], slots)


def turn_messages(rng: random.Random, turn: Turn) -> list[ChatMessage]:
    said = as_typed(turn[0]) if len(turn[0]) < 100 and rng.random() < 0.15 else turn[0]
    return [{"role": "user", "content": said}, {"role": "assistant", "content": turn[1]}]


def as_typed(text: str) -> str:
    """Return `text` as people in a hurry write: small first letter, no mark at the end."""
    return text[:1].lower() + text[1:].rstrip("?.!")


def system_messages(rng: random.Random) -> list[ChatMessage]:
    """Return no, a short or a long system message; the long ones teach the model to read past them."""
    if rng.random() < 0.6:
        return []
    content = rng.choice(SYSTEMS)
    if rng.random() < 0.2:
        topic = rng.choice(tuple(MESH.values()) + tuple(EVERYDAY.values()))
        content += expand(rng, "{ |\n\n}{Remember this:|Here is what you know:|}") + " " + paragraph(rng, topic)
    return [{"role": "system", "content": content}]


def greeting(rng: random.Random) -> list[Turn]:
    return [drawn(rng, rng.choice(GREETINGS))]


def unknown(rng: random.Random) -> list[Turn]:
    topic = rng.choice([name[2:] for name in EVERYDAY if name.startswith("a ")])
    return [drawn(rng, (rng.choice(UNKNOWN), UNKNOWN_ANSWER), year=str(rng.randint(1500, 2030)), topic=topic)]


def story_chat(rng: random.Random) -> list[Turn]:
    """The user asks for a story, then maybe asks about it, or asks for a summary."""
    what, slots = story_wish(rng)
    story = tell(rng, slots)
    answer = story.text
    if rng.random() < 0.3:
        answer = expand(rng, "{Here is a story for you|Of course|With pleasure|Gladly}{.|!} ") + " " + answer
    request = expand(rng, rng.choice(STORY_REQUESTS), {"what": what}) if what else expand(rng, ANY_STORY)
    return [(request, answer), *story_questions(rng, story, rng.choice((0, 0, 1, 2)))]


ANY_STORY = "{Tell me|Please tell me|Write|Can you tell me} {a|a short|another} story{.|, please.|}"


def story_wish(rng: random.Random) -> tuple[str, dict[str, str]]:
    """Return what the story shall be about, as the user says it, and a world in which this holds."""
    slots = draw_world(rng)
    wish = rng.choice((
        "", "a [kind]", "a [kind] [at]", "a [kind] [at]", "a [adj] [kind]", "a [kind] named [name]",
        "a [kind] called [name] [at]", "[name] the [kind]", "a [kind] and a [fkind]", "a [adj] [kind] [at]",
        "a [kind] and a [colour] [thing]", "a [adj] [kind] who lives [at]", "a [adj] [kind] named [name]",
        "a [kind] [at] in [season]",
    ))  # fmt: skip
    return expand(rng, wish, slots), slots


def story_questions(rng: random.Random, story: Story, count: int) -> list[Turn]:
    """Return `count` turns about a story that was told: questions, a summary, or a title."""
    turns: list[Turn] = []
    for question, answer in rng.sample(story.questions, count):
        turns.append((question, answer) if rng.random() < 0.8 else about_the_whole(rng, story))
    return turns


def about_the_whole(rng: random.Random, story: Story) -> Turn:
    if rng.random() < 0.7:
        ask = "{Summarize|Please summarize|Can you summarize|Give me a summary of} the story{| in a few words| in one sentence}."
        return expand(rng, ask), story.summary
    ask = "{Give the story a title.|What could be the title of the story?|Find a title for it.}"
    title = '{A good title is|The title could be} "[name] and the [colour] [thing]"{.|, because the story is about [name] the [kind].}'
    return expand(rng, ask), expand(rng, title, story.slots)


def pasted_story(rng: random.Random) -> list[Turn]:
    """The user pastes a story and asks about it; the answers have to be read off the text."""
    story = tell(rng, draw_world(rng), long=rng.random() < 0.7)
    first, *later = story_questions(rng, story, rng.choice((1, 2, 2, 3)))
    before = (
        "{|Here is a story:|Read this story:|Please read this text and answer the question.|Story:|This is a story.}"
    )
    text = rng.choice((" ", "\n", "\n\n")).join((expand(rng, before), story.text)).strip()
    if rng.random() < 0.2:
        asked = expand(rng, "{Question:|My question:|Answer this question:}") + " " + first[0] + "\n\n" + text
    else:
        asked = text + rng.choice(("\n\n", "\n", " ")) + expand(rng, "{||Question:|My question is:}") + " " + first[0]
    return [(asked.replace("\n ", "\n").replace("  ", " "), first[1]), *later]


ASK_HOW = "{How does [topic] work|Explain how [topic] works|Can you explain how [topic] works|Explain [topic]|Tell me about [topic]|What is [topic]|Please explain [topic]}"


def explanation(rng: random.Random) -> list[Turn]:
    """Return a chat that explains one or two everyday things, sometimes in one or two sentences."""
    topics = rng.sample(tuple(EVERYDAY), rng.choice((1, 1, 2)))
    return [explained(rng, topic, EVERYDAY[topic], topic) for topic in topics]


def explained(rng: random.Random, topic: str, text: str, name: str) -> Turn:
    question = expand(rng, ASK_HOW, {"topic": name})
    end = "?" if question.startswith(("How", "Can", "What")) else "."
    lines = text.split("\n")
    if rng.random() < 0.15:
        question += rng.choice((" in one sentence", " in a single sentence"))
        lines = lines[:1]
    elif rng.random() < 0.15:
        question, lines = question + " in two sentences", lines[:2]
    return question + (end if rng.random() < 0.9 else ""), paragraph(rng, "\n".join(lines))


def mesh_talk(rng: random.Random) -> list[Turn]:
    turns = []
    for topic in rng.sample(tuple(MESH), rng.choice((1, 1, 2))):
        name = MESH_NAMES[topic] if rng.random() < 0.3 else topic
        turns.append(explained(rng, topic, MESH[topic], name))
    if rng.random() < 0.3:
        turns.insert(rng.randint(0, len(turns)), drawn(rng, rng.choice(MESH_QUESTIONS)))
    return turns


MESH_QUESTIONS = (
    ("{What happens to my request|What happens when I send a request|How does a request move through the mesh}?",
     "First, the frontend {takes your request|receives it} and makes tokens of it. Then the router picks a worker that {already holds the prefix|has most of it in its cache}. "
     "A prefill worker computes the prompt, and a decode worker {pulls the blocks|fetches the blocks} and streams the tokens {back to you|through the frontend}."),
    ("{Why are prefill and decode separate|Why do you split prefill and decode|Why not use one worker for all}?",
     "Because they need different things. Prefill {computes many tokens at once|needs much computing}, and decode {makes one token at a time|needs much memory}. "
     "If both run in one place, a long prompt {slows down|stops} the answers of others."),
    ("{What happens if a worker fails|What happens when a worker stops|What if a worker dies}?",
     "The router {notices that it is gone|sees that it no longer answers} and {sends the request to another worker|picks another worker}. "
     "The tokens that {you already have|were already sent} stay the same, and {the answer goes on|the new worker goes on from there}."),
    ("{What is the difference between prefill and decode|How do prefill and decode differ}?",
     "Prefill {reads the whole prompt at once|computes the prompt} and fills the KV cache. Decode {writes the answer|makes the answer} token by token and uses {this cache|the KV cache}."),
    ("{Why is the second answer faster|Why is it faster when I ask again|Why is the same prompt faster the second time}?",
     "Because the {beginning|prefix} of your prompt is already in the KV cache of a worker. The router {sends you to the same worker|finds this worker}, and {only the new tokens|only the rest} must be computed."),
)  # fmt: skip


def small_fact(rng: random.Random) -> list[Turn]:
    """Two or three short questions with short answers."""
    makers = (
        colour_fact,
        animal_fact,
        season_fact,
        sum_fact,
        count_fact,
        capital_fact,
        opposite_fact,
        week_fact,
        animal_fact,
    )
    return [maker(rng) for maker in rng.sample(makers, rng.choice((1, 2, 2, 3)))]


def colour_fact(rng: random.Random) -> Turn:
    thing, colour = rng.choice(tuple(words.COLOUR_OF.items()))
    verb = "is"
    return (
        expand(rng, f"{{What colour {verb} {thing}|Which colour has {thing}|What is the colour of {thing}}}?"),
        expand(rng, f"{capitalized(thing)} {verb} {colour}."),
    )


def animal_fact(rng: random.Random) -> Turn:
    animal, facts = rng.choice(tuple(words.ANIMAL_FACTS.items()))
    if rng.random() < 0.3:
        riddle = rng.sample(facts, 2)
        return "Which animal is this? " + " ".join(riddle), expand(
            rng, "{It is|This is|That must be} " + f"a {animal}."
        )
    ask = f"{{What is a {animal}|Tell me about the {animal}|What do you know about the {animal}|Tell me something about a {animal}}}"
    question = expand(rng, ask)
    chosen = rng.sample(facts, 3)
    start = expand(
        rng,
        f"{{A {animal} is an animal.|The {animal} is an interesting animal.|Here is what I know about the {animal}.}}",
    )
    return question + ("?" if question.startswith("What") else "."), " ".join((start, *chosen))


def season_fact(rng: random.Random) -> Turn:
    season = rng.choice(words.SEASONS)
    if rng.random() < 0.2:
        return (expand(rng, "{What are the seasons|Name the four seasons|Which seasons are there}?"),
                "The four seasons are spring, summer, autumn and winter.")  # fmt: skip
    ask = (
        f"{{What happens in {season}?|Tell me about {season}.|What is {season} like?|How is the weather in {season}?}}"
    )
    return expand(rng, ask), expand(rng, SEASON_FACTS[season])


def sum_fact(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.3:
        a, b = max(a, b), min(a, b)
        return f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}."
    plus = rng.choice((" + ", " plus ", "+"))
    return f"{rng.choice(('What is', 'How much is'))} {a}{plus}{b}?", f"{a} plus {b} is {a + b}."


def count_fact(rng: random.Random) -> Turn:
    first = rng.choice((1, 1, 1, rng.randint(1, 10)))
    last = rng.randint(first + 2, min(first + 12, 20))
    if rng.random() < 0.5:
        return (expand(rng, f"{{Count|Please count|Can you count}} from {first} to {last}."),
                ", ".join(map(str, range(first, last + 1))) + ".")  # fmt: skip
    spelled = words.NUMBERS[first : last + 1]
    return f"Count from {spelled[0]} to {spelled[-1]} in words.", capitalized(and_list(spelled)) + "."


def capital_fact(rng: random.Random) -> Turn:
    country, capital = rng.choice(tuple(words.CAPITALS.items()))
    if rng.random() < 0.2:
        return f"Where is {capital}?", f"{capital} is the capital of {country}."
    ask = f"{{What is the capital of {country}|Which city is the capital of {country}|What is the capital city of {country}}}?"
    return expand(rng, ask), f"The capital of {country} is {capital}."


def opposite_fact(rng: random.Random) -> Turn:
    pair = list(rng.choice(tuple(words.OPPOSITES.items())))
    rng.shuffle(pair)
    ask = f"{{What is the opposite of {pair[0]}|Which word is the opposite of {pair[0]}}}?"
    return expand(rng, ask), f'The opposite of "{pair[0]}" is "{pair[1]}".'


def week_fact(rng: random.Random) -> Turn:
    names, kind = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    place = rng.randrange(len(names))
    after = names[(place + 1) % len(names)]
    if rng.random() < 0.3:
        whole = "the week" if kind == "day" else "the year"
        return f"What are the {kind}s of {whole}?", f"The {kind}s of {whole} are {and_list(names)}."
    if rng.random() < 0.5:
        return f"Which {kind} comes after {names[place]}?", f"After {names[place]} comes {after}."
    return f"Which {kind} comes before {after}?", f"Before {after} comes {names[place]}."


def recall(rng: random.Random) -> list[Turn]:
    """The user says something about himself and asks for it later."""
    name, food, colour = draw_name(rng, rng.random() < 0.5), rng.choice(words.FOODS), rng.choice(words.COLOURS)
    kind, place = rng.choice(words.ANIMALS), at(rng.choice(tuple(words.PLACES)))
    facts = [
        (f"{{My name is|I am|You can call me}} {name}", "{What is my name|Who am I|Do you remember my name}?", f"Your name is {name}."),
        (f"my favourite colour is {colour}", "{What is my favourite colour|Which colour do I like}?", f"Your favourite colour is {colour}."),
        (f"I like to eat {food}", "{What do I like to eat|What is my favourite food}?", f"You like to eat {food}."),
        (f"I have a {colour} {kind}", "{What animal do I have|Which animal do I have}?", f"You have a {colour} {kind}."),
        (f"I live {place}", "{Where do I live|Do you know where I live}?", f"You live {place}."),
    ]  # fmt: skip
    told = [facts[0], *rng.sample(facts[1:], rng.choice((0, 1, 2)))]
    said = capitalized(" and ".join(expand(rng, fact[0]) for fact in told)) + "."
    hello = expand(
        rng, f"Nice to meet you, {name}! {{What can I do for you|How can I help you|Shall I tell you a story}}?"
    )
    asked = rng.sample(told, rng.randint(1, len(told)))
    return [(said, hello), *((expand(rng, ask), answer) for _, ask, answer in asked)]


def listing(rng: random.Random) -> list[Turn]:
    """Lists of known words, and words repeated or picked from the user's own list."""
    count = rng.randint(2, 6)
    what, pool = rng.choice((
        ("animals", words.ANIMALS), ("colours", words.COLOURS), ("foods", words.FOODS), ("things", words.THINGS),
        ("places", tuple(words.PLACES)), ("names", words.NAMES_SHE + words.NAMES_HE),
    ))  # fmt: skip
    items = rng.sample(pool, count)
    number = rng.choice((str(count), words.NUMBERS[count]))
    if rng.random() < 0.3:
        said = rng.choice(("Repeat these words: ", "Say this again: ", "Repeat after me: "))
        return [(said + ", ".join(items) + ".", capitalized(", ".join(items)) + ".")]
    ask = expand(rng, f"{{Name|List|Give me|Tell me|Write down}} {number} {what}{{.|, please.}}")
    if rng.random() < 0.4:
        return [
            (ask, f"Here are {number} {what}:\n" + "\n".join(f"{i}. {capitalized(x)}" for i, x in enumerate(items, 1)))
        ]
    return [(ask, f"Here are {number} {what}: {and_list(items)}.")]


def poem(rng: random.Random) -> list[Turn]:
    slots = {"kind": rng.choice(words.ANIMALS), "colour": rng.choice(words.COLOURS)}
    about = rng.choice(
        ("", " about the night", " about the sea", " about the sun", f" about a {slots['kind']}", " about the winter")
    )
    ask = expand(rng, "{Write|Write me|Tell me|Can you write|Please write} a {|short |little }poem") + about + "."
    lines = [line for pair in rng.sample(POEM_LINES, 2) for line in pair]
    return [(expand(rng, ask), "\n".join(expand(rng, line, slots) for line in lines))]
