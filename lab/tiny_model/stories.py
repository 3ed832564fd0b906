# ruff: noqa: E501 - a sentence with all its choices stays on one line
"""Short stories: a world is drawn, told by one or more plots, and asked about afterwards."""

import random
from dataclasses import dataclass, field

from kvmesh.lab.tiny_model import words
from kvmesh.lab.tiny_model.grammar import capitalized, expand, paragraph


@dataclass(slots=True)
class Story:
    """A told story and what is true in it. `slots` are the words that its plots were filled with."""

    slots: dict[str, str]
    text: str = ""
    summary: str = ""
    questions: list[tuple[str, str]] = field(default_factory=list)  # (question, answer)


OPENINGS = (
    "{Once upon a time|Once|Long ago|A long time ago|One year}, there {was|lived} a [adj] [kind] {named|called} [name] [at].",
    "[name] {was|is} a [adj] [kind] who {lived|had a home} [at].",
    "[At] there {was|lived} a [adj] [kind]. [His] name was [name].",
    "In a {small|little|quiet} house [at] lived [name], a [adj] [kind].",
    "This is the story of [name], a [adj] [kind] who lived [at].",
)

HABITS = """[name] {loved|liked} {to eat [food]|to walk in the [weather] weather|to sing|to look at the stars|to help others|to play outside|to ask questions}.
{|Every {morning|evening} [he] {looked out of the window|went for a walk|sang a song|drank a cup of tea}.}
{|Everyone [at] knew [him].}{| [He] had a [colour2] [thing2] that [he] {loved very much|took everywhere}.}"""

# Each plot: (story lines, summary, questions as "question ? answer"). [friend] always meets [name] by the plot.
PLOTS: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "found": (
        """One [weather] [time] in [season], [name] {went for a walk|was walking alone|went out to play}. [weatherline]
Under a {tree|bush|big stone|bench}, [he] {saw|found} a [colour] [thing]. "{Who lost this|Whose [thing] is this|Where does this come from}?" [he] {asked|said|thought}.
[name] {asked everyone [at]|went from door to door|looked for the owner all day}, {but nobody knew|but it was hard}.
At last [he] met [friend], a [fadj] [fkind], who was {crying|looking sad|looking for something}.
"{That is my [thing]|You found my [thing]}!" said [friend]. "{Thank you so much|I am so happy|I looked for it everywhere}!"
[friend] {gave [name] some [food]|shared [fhis] [food] with [name]|invited [name] to eat [food]}, and they {became good friends|sat together until the sun went down|laughed together}.""",
        "[name] the [kind] found a [colour] [thing] and gave it back to [friend] the [fkind].",
        (
            ("{What did [name] find|What was under there|Which thing did [name] find}", "[name] found a [colour] [thing]. It {belonged to|was the [thing] of} [friend] the [fkind]."),
            ("{Who lost the [thing]|Whose [thing] was it|To whom did the [thing] belong}", "The [thing] belonged to [friend], a [fadj] [fkind]."),
        ),
    ),
    "lost": (
        """One [weather] [time] in [season], [name] {could not find|had lost} [his] [colour] [thing]. [weatherline]
[He] looked {under the bed|behind the door|in every corner} and {in the grass|on the roof|under the table}, but the [thing] was {gone|not there}.
[name] {felt sad|began to cry|sat down and sighed}. Then [friend], a [fadj] [fkind], {came by|walked past|heard [him]}.
"{Do not be sad|Do not worry|Do not cry}," said [friend]. "{I will help you|We will look together|Two can see more than one}."
They {looked|searched} {for a long time|all afternoon|everywhere} [at]. {|They asked the birds and they asked the wind.}
{In the end|At last|Finally}, [friend] found the [colour] [thing] {in a tree|in a hole|behind a rock|next to the path}.
"{Thank you|You are a true friend|How kind of you}!" said [name]. {To celebrate|That evening}, they ate [food] {together|and told stories|by the fire}.""",
        "[name] the [kind] lost a [colour] [thing], and [friend] the [fkind] helped to find it.",
        (
            ("{What did [name] lose|What was lost|What was [name] looking for}", "[name] lost a [colour] [thing]. [friend] helped to find it."),
            ("{Who found the [thing]|Who helped [name] to look for the [thing]}", "[friend] the [fkind] found the [thing]."),
        ),
    ),
    "bake": (
        """One [weather] [time] in [season], [name] {wanted to|decided to} {make|cook|prepare} [food] for {a friend|a party|the whole village}. [weatherline]
[He] {took|found} a [colour] [thing] and a {big|large|heavy} pot, {but something was missing|but there was no salt|but the fire would not burn}.
So [he] went to [friend], a [fadj] [fkind] who lived {next door|down the road|across the bridge}.
"{Can you help me|Could you help me, please|I need your help}?" asked [name]. "{Of course|Yes, with joy|Let us try}," said [friend].
{They worked side by side|They mixed and stirred and laughed}, and soon the {whole house|air} smelled {wonderful|sweet|of [food]}.
{When the food was ready|In the evening}, they {sat down|put everything on a long table} and ate {until they were full|with all their friends}.
"{Food tastes better when we share it|This is the best day of the year}," said [friend]. [name] {smiled|agreed|nodded happily}.""",
        "[name] the [kind] made [food] with the help of [friend] the [fkind].",
        (
            ("{What did they eat|What food did [name] make|What did [name] want to make}", "They made [food]. [name] and [friend] worked on it together."),
            ("{Who lived near [name]|Who helped [name] with the food}", "[friend], a [fadj] [fkind], helped [name]."),
        ),
    ),
    "storm": (
        """One [time] in [season], a {great|terrible|loud} storm came to the [place]. {The sky turned black|Thunder rolled over the land|The wind pulled at the trees}.
[name] {was afraid|hid under a blanket|held on to a [colour] [thing]}. Then [he] heard a {small|quiet|weak} voice outside.
It was [friend], a [fadj] [fkind], who was {cold and wet|lost in the dark|far from home}.
[name] {forgot [his] fear|was still afraid, but [he] was brave} and {opened the door|ran out into the rain|called as loud as [he] could}. "{Come in|Quick, come with me|You are safe here}!" [he] said.
[name] gave [friend] {warm [food]|a warm place by the fire and some [food]} and a [colour] [thing] to {hold|look at|play with}.
They {told stories|sang songs} until the storm {was over|went away}. {In the morning|The next morning}, the sky was {blue|clear} and the birds were singing.
"{You saved me|I will never forget this}," said [friend]. {And from that day on, [name] was not afraid of storms|From then on, they met every week}.""",
        "In a storm, [name] the [kind] helped [friend] the [fkind].",
        (
            ("{Who came in the storm|Whose voice did [name] hear}", "It was [friend], a [fadj] [fkind]. [name] let [fhim] in and kept [fhim] safe."),
            ("{What did [name] give [friend]|What did [friend] get from [name]}", "[name] gave [friend] some [food] and a [colour] [thing]."),
        ),
    ),
    "seed": (
        """In [season], [name] {found|was given} a {tiny|small} seed {in a [colour] [thing]|next to a [colour] [thing]}. "{What will it be|What will grow from it}?" [he] {asked|wondered}.
[name] {put it in the ground|dug a hole and laid the seed in it} and gave it water every day. {|Some days were [weather], and some were not.}
But {nothing happened|nothing grew}. "{It is of no use|It will never grow}," said [name].
"{Wait a little|Be patient|Good things need time}," said [friend], a [fadj] [fkind] who {knew a lot about plants|was passing by|came to visit}.
So [name] waited {and waited|for many days}, and [friend] {came to help|brought [food]|told stories to the seed}.
One morning there was a {small|thin} green leaf, and later a {tall|beautiful} {flower|tree|plant} with [colour2] {flowers|leaves}.
"{We did it|Look how tall it is}!" {cried|called|said} [name]. {All who came by stopped to look|Bees and birds came from far away}. [name] had learned {to wait|to be patient}.""",
        "[name] the [kind] planted a seed and learned to be patient, with the help of [friend] the [fkind].",
        (
            ("{What did [name] plant|What did [name] put in the ground}", "[name] planted a small seed. It grew into a plant with [colour2] flowers or leaves."),
            ("{What colour were the flowers|What colour was the plant}", "The plant was [colour2]."),
        ),
    ),
    "race": (
        """One [weather] [time] in [season], there was a {race|big race} [at]. [weatherline]
The first prize was a [colour] [thing]. [friend], a [fadj] [fkind], was {very fast|sure to win|the fastest of all}.
"{You are too slow|You will never win}," {laughed|said} [friend]. But [name] {did not listen|said nothing|only smiled}.
They ran {over the hill|through the grass|around the trees} {and|and then} {over the bridge|past the old mill|along the water}.
{Suddenly|Then|Near the end}, [friend] {fell|hurt [fhis] foot|fell into a hole}. [name] {could have won|was now the first}, but [he] stopped {to help|and went back}.
They {crossed the line|came to the end} {together|side by side}, and {everyone cheered|all the others clapped}.
They shared the [thing] {and a plate of [food]|and ate [food] together}. "{You are faster than I am in your heart|A friend is better than a prize|I am sorry that I laughed}," said [friend].""",
        "[name] the [kind] stopped in a race to help [friend] the [fkind], and they shared the prize.",
        (
            ("{What was the prize|What could they win|What was the first prize}", "The prize was a [colour] [thing]. [name] and [friend] shared it."),
            ("{Who fell in the race|Whom did [name] help in the race}", "[friend] the [fkind] fell, and [name] stopped to help."),
        ),
    ),
    "boat": (
        """One [weather] [time] in [season], [name] {wanted to see the world|wanted to travel|dreamed of far places}. [weatherline]
[He] {built a small boat|made a boat out of wood} and {took|packed} a [colour] [thing] and some [food].
On the way [he] met [friend], a [fadj] [fkind]. "{Where are you going|May I come with you}?" asked [friend].
"{I do not know yet|To the end of the water|Come with me and see}," said [name]. {So they went on together|And so they were two}.
They saw {high mountains|big fish|green islands} and {strange birds|ships with white sails|a whale}. At night they {counted the stars|slept under the moon|sang to the waves}.
After {three|seven|ten|many} days, they {came home|were back at the [place]}. {Everyone wanted to hear the story|They had much to tell}.
"{The world is big|It was a long way}," said [name], "{but home is best|but I was never alone}." """,
        "[name] the [kind] travelled in a small boat with [friend] the [fkind].",
        (
            ("{What did [name] take along|What did [name] pack|What was in the boat}", "[name] took a [colour] [thing] and some [food]."),
            ("{Who went with [name]|Who came along in the boat}", "[friend], a [fadj] [fkind], went with [name]."),
        ),
    ),
    "music": (
        """One [weather] [time] in [season], [name] heard {music|a beautiful song|a soft sound} [at]. [weatherline]
{[He] followed the sound|[He] walked towards it} until [he] saw [friend], a [fadj] [fkind], who was playing on a [colour] [thing].
"{Can you teach me|How do you do that|That is wonderful}?" {asked|said} [name]. "{Yes, but it takes time|Sit down and listen first}," said [friend].
{At first|In the beginning} it {sounded terrible|sounded like an old door|was very hard}, and [name] {wanted to stop|was ashamed}.
But [friend] said, "{Try once more|Everyone begins like this|A little every day is enough}." So [name] {tried again|played every day}.
{In the end|After some weeks}, they played {together|side by side} {for the whole town|at a feast}, and people {danced|clapped and cried for more|brought them [food]}.
[name] {was happy and proud|had never been so happy}.""",
        "[name] the [kind] learned to make music from [friend] the [fkind].",
        (
            ("{Who taught [name]|Who was playing music|Who made the music}", "[friend] the [fkind] taught [name] to make music on a [colour] [thing]."),
            ("{What did [friend] play on|What did the music come from}", "[friend] played on a [colour] [thing]."),
        ),
    ),
    "gift": (
        """It was the birthday of [friend], a [fadj] [fkind], on a [weather] [time] in [season]. [weatherline]
[name] wanted to {give|bring} [fhim] {something nice|a gift}, but [he] had {no money|nothing to give}.
[name] {thought for a long time|walked up and down|asked the moon}. Then [he] had an idea. [He] took {an old|a broken} [thing], {cleaned it|mended it} and painted it [colour].
When [friend] {saw it|opened the box}, [fhe] {was very quiet|jumped for joy|smiled from ear to ear}. "{Did you make this for me?|This is the best gift I ever had!}" said [friend].
They ate [food] and {danced until it was late|played games|looked at the stars}.
"{A gift does not have to be new|A gift comes from the heart}," {thought [name]|said [friend]}.""",
        "[name] the [kind] made a [colour] [thing] as a gift for the birthday of [friend] the [fkind].",
        (
            ("{Whose birthday was it|Who had a birthday}", "It was the birthday of [friend], a [fadj] [fkind]."),
            ("{What was the gift|What did [name] give to [friend]|What did [friend] get}", "The gift was a [thing] that [name] painted [colour]."),
        ),
    ),
    "dark": (
        """[name] had one secret: [he] was afraid of {the dark|the night|the old [place]}. One [weather] [time] in [season], [he] {had to go out|could not sleep}. [weatherline]
{Something moved|There was a strange noise|Two eyes were shining} {behind a tree|in the shadows|outside}. "{Who is there|What is that}?" {whispered|called} [name].
{"It is only me," said a voice|"Do not be afraid," said a voice}. It was [friend], a [fadj] [fkind], with a [colour] [thing] in [fhis] hand.
"{I like the night|The night is my friend}," said [friend]. "{Look up|Come, I will show you}." {Above them were a thousand stars|The moon was round and bright}.
They {sat down|sat on a stone} and shared some [food], and [name] {was not afraid any more|forgot to be afraid}.
{Since then|After that night}, [name] {likes the dark|often goes out to see the stars}.""",
        "[name] the [kind] was afraid of the dark until [friend] the [fkind] showed [him] the stars.",
        (
            ("{What was [name] afraid of|What was the secret of [name]}", "[name] was afraid of the dark, but [friend] helped [him]."),
            ("{What did [friend] hold|What was in the hand of [friend]}", "[friend] had a [colour] [thing]."),
        ),
    ),
    "bridge": (
        """One [weather] [time] in [season], the {old bridge|only bridge|wooden bridge} near the [place] broke. [weatherline]
{Nobody could cross the water|The two sides were cut off}. "{What shall we do|Who will help us}?" {everyone asked|asked the people}.
[name] had a plan. "{We need wood and rope|If all of us help, we can build a new one}," [he] said. {Some laughed|Not everyone believed it}, but [friend], a [fadj] [fkind], {came to help|said yes at once}.
[name] {held the rope|carried the wood} and [friend] {used a [colour] [thing] to measure|brought tools in a [colour] [thing]}. {Others saw them and came too|Soon ten others were helping}.
After {two|three|five} days, the new bridge was {ready|strong and wide}. They {ate [food]|had a feast with [food]} in the middle of it.
"{Many hands make light work|Alone I could not have done it}," said [name].""",
        "[name] the [kind] and [friend] the [fkind] built a new bridge together.",
        (
            ("{What did they build|What was broken|What did [name] and [friend] build}", "They built a new bridge, because the old one was broken."),
            ("{Who came to help [name] build|Who helped to build it}", "[friend], a [fadj] [fkind], came to help."),
        ),
    ),
}  # fmt: skip

ENDINGS = (
    "{||They were friends for the rest of their lives.|That night, [name] slept very well.|And they all lived happily."
    "|[name] never forgot that day.|It was a good day.|The story ends here, but the friendship did not."
    "|And if you walk by the [place] today, you may still see them there.}"
)

ASIDES = (
    "The [place] {was a good place to live|was quiet at that hour}. {Birds sang|The wind sang|Water ran over the stones}, and {the air smelled of grass|smoke rose from the houses}.",
    "[name] {stopped|stood still} for a moment and {listened|looked around}. {Far away|Somewhere}, a bell rang {twice|three times}.",
    "{Nobody|No one} {knew|could say} what would happen next. {Even the birds were quiet|The clouds moved slowly over the [place]}.",
    "[name] thought of {home|warm [food]|the long way back} and {smiled|walked a little faster}.",
    "A [colour2] {bird|butterfly} {flew by|sat on a branch and watched}. {It sang two notes and was gone|\"Good day to you,\" said [name]}.",
)  # fmt: skip

THEN = ("The next day, there was more to come.", "A week later, something else happened.",
        "But that was not all.", "Some days went by.")  # fmt: skip


def draw_world(rng: random.Random, **fixed: str) -> dict[str, str]:
    """Return the slots of a story; `fixed` ones (kind, place, name, thing, colour, ...) are kept."""
    she, friend_she = rng.random() < 0.5, rng.random() < 0.5
    if fixed.get("kind") in words.PEOPLE_SHE or fixed.get("kind") in words.PEOPLE_HE:
        she = fixed["kind"] in words.PEOPLE_SHE
    if "name" in fixed:
        she = fixed["name"] in words.NAMES_SHE
    colour, colour2 = rng.sample(words.COLOURS, 2)
    thing, thing2 = rng.sample(words.THINGS, 2)
    adj, fadj = rng.sample(words.ADJECTIVES, 2)
    weather = rng.choice(tuple(words.WEATHERS))
    slots = {
        "kind": draw_kind(rng, she), "fkind": draw_kind(rng, friend_she), "name": draw_name(rng, she),
        "adj": adj, "fadj": fadj, "colour": colour, "colour2": colour2, "thing": thing, "thing2": thing2,
        "food": rng.choice(words.FOODS), "weather": weather, "season": rng.choice(words.SEASONS),
        "time": rng.choice(words.TIMES), "place": rng.choice(tuple(words.PLACES)),
    } | fixed  # fmt: skip
    slots["weatherline"] = expand(rng, "{|" + words.WEATHERS[slots["weather"]] + "}") if rng.random() < 0.7 else ""
    slots["friend"] = next(n for n in iter(lambda: draw_name(rng, friend_she), None) if n != slots["name"])
    slots["at"] = at(slots["place"])
    slots["At"] = capitalized(slots["at"])
    return slots | pronouns(she, "") | pronouns(friend_she, "f")


def draw_kind(rng: random.Random, she: bool) -> str:
    people = words.PEOPLE_SHE if she else words.PEOPLE_HE
    return rng.choice(words.ANIMALS if rng.random() < 0.75 else people)


def draw_name(rng: random.Random, she: bool) -> str:
    return rng.choice(words.NAMES_SHE if she else words.NAMES_HE)


def pronouns(she: bool, prefix: str) -> dict[str, str]:
    he, him, his = ("she", "her", "her") if she else ("he", "him", "his")
    slots = {prefix + "he": he, prefix + "him": him, prefix + "his": his}
    return slots | {capitalized(key): capitalized(word) for key, word in slots.items()}


def at(place: str) -> str:
    """Return the place with its preposition: "in the forest"."""
    return f"{words.PLACES.get(place, 'in')} the {place}"


def tell(rng: random.Random, slots: dict[str, str], long: bool = False) -> Story:
    """Tell a story in the world of `slots`: one plot (about 100-170 tokens), or two with asides (200-400)."""
    story = Story(slots)
    parts = [expand(rng, rng.choice(OPENINGS), slots)]
    if long or rng.random() < 0.3:
        parts.append(paragraph(rng, HABITS, slots))
    plots = rng.sample(tuple(PLOTS), 2 if long else 1)
    summaries = [add_plot(rng, story, plots[0], slots, parts, long)]
    if long:
        later = next_world(rng, slots)
        parts.append(rng.choice(THEN))
        story.questions += world_questions(rng, later)
        summaries.append(add_plot(rng, story, plots[1], later, parts, long))
    parts.append(expand(rng, ENDINGS, slots))
    story.text = paragraph(rng, "\n".join(parts))
    story.summary = " Later, ".join(summaries)
    story.questions += world_questions(rng, slots)
    return story


def add_plot(rng: random.Random, story: Story, plot: str, slots: dict[str, str], parts: list[str], long: bool) -> str:
    """Append the plot's text to `parts` and its questions to `story`; return its summary."""
    lines, summary, questions = PLOTS[plot]
    told = lines.split("\n")
    if long:
        for aside in rng.sample(ASIDES, rng.randint(0, 2)):
            told.insert(rng.randint(1, len(told) - 1), aside)
    parts.append(paragraph(rng, "\n".join(told), slots))
    asked = [*questions, *COLOUR_QUESTION] if "[colour] [thing]" in lines else list(questions)
    story.questions += [(expand(rng, q, slots) + "?", expand(rng, a, slots)) for q, a in asked]
    return expand(rng, summary, slots)


COLOUR_QUESTION = (
    ("{What colour was|Which colour had|What was the colour of} the [thing]", "The [thing] was [colour]."),
)


def next_world(rng: random.Random, slots: dict[str, str]) -> dict[str, str]:
    """Return the world of a second plot: the same hero and place, another friend, thing, food and weather."""
    keep = {key: slots[key] for key in ("kind", "name", "adj", "place", "thing2", "colour2")}
    while True:
        later = draw_world(rng, **keep)
        if later["thing"] not in (slots["thing"], slots["thing2"]) and later["friend"] != slots["friend"]:
            return later | {key: slots[key] for key in ("he", "him", "his", "He", "Him", "His")}


WORLD_QUESTIONS = (
    ("{Who is the story about|Who is the hero of the story|Who is the main character}",
     "The story is about [name], a [adj] [kind] who {lives|lived} [at]."),
    ("{Where does the story happen|Where did [name] live|Where does [name] live|In which place does it happen}",
     "{The story happens|[name] lived} [at]."),
    ("{What kind of animal or person is [name]|Who is [name]|What is [name]}", "[name] is a [adj] [kind]."),
    ("{Who is [friend]|What kind of animal or person is [friend]|Who was [friend]}",
     "[friend] is a [fadj] [fkind] and a friend of [name]."),
    ("{Where does this take place|Where are we in this story}", "It takes place [at], where [name] the [kind] lived."),
)  # fmt: skip


def world_questions(rng: random.Random, slots: dict[str, str]) -> list[tuple[str, str]]:
    return [(expand(rng, q, slots) + "?", expand(rng, a, slots)) for q, a in WORLD_QUESTIONS]
