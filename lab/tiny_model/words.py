# ruff: noqa: SIM905 - lists of words are easier to read and to extend as text
"""The small world that the stories and chats speak about."""

NAMES_HE = tuple(
    "Milo Ben Oscar Leo Tom Max Sam Finn Jack Noah Theo Hugo Felix Bruno Otto Pip Toby Henry Arlo Jonas Emil "
    "Ravi Omar Kenji Mateo Luca Paul Peter Adam Daniel David Oliver Simon Victor Walter".split()
)
NAMES_SHE = tuple(
    "Mia Anna Lily Nora Ella Rosa Lucy Emma Ruby Daisy Clara Ida Maya Zoe Alice Greta Hazel Ivy Luna Poppy Stella "
    "Tina Wilma Sara Yuki Amira Lena Nina Olga Priya Julia Sofia Kate Grace Bella".split()
)
ANIMALS = tuple(
    "cat dog fox bear rabbit mouse owl duck frog horse cow pig goat sheep hen goose squirrel hedgehog badger beaver "
    "otter deer wolf lion tiger monkey elephant giraffe penguin turtle whale dolphin crab bee ant snail robin "
    "crow swan donkey parrot koala panda kangaroo camel mole bat seal lizard dragon".split()
)
PEOPLE_HE = ("boy", "king", "prince", "baker", "sailor", "gardener", "farmer", "painter", "robot", "wizard", "cook")
PEOPLE_SHE = ("girl", "queen", "princess", "baker", "doctor", "gardener", "farmer", "teacher", "witch", "pilot", "cook")
ADJECTIVES = tuple(
    "brave small curious kind clever shy happy young gentle quiet cheerful hungry sleepy lazy funny careful proud "
    "little old quick patient lonely busy friendly".split()
)
COLOURS = tuple("red blue green yellow orange purple pink white black brown grey golden silver".split())
# place -> the preposition that goes with it
PLACES = {
    "forest": "in", "garden": "in", "village": "in", "town": "in", "castle": "in", "park": "in", "kitchen": "in",
    "valley": "in", "desert": "in", "jungle": "in", "library": "in", "school": "at", "market": "at", "harbour": "at",
    "beach": "on", "farm": "on", "hill": "on", "mountain": "on", "island": "on", "river": "by", "lake": "by",
    "sea": "by", "lighthouse": "in", "city": "in", "meadow": "in", "cave": "in", "moon": "on", "ship": "on",
    "train": "on", "bakery": "in", "museum": "in", "zoo": "at",
}  # fmt: skip
THINGS = tuple(
    "lantern ball kite hat key book boat bell drum box stone shell scarf umbrella button basket map coin ring "
    "feather cup bag blanket ribbon bicycle flag pencil flute crown coat balloon mirror clock wagon doll candle "
    "bucket chair spoon letter".split()
)
FOODS = tuple(
    "apples bread soup cake cheese berries honey pancakes carrots nuts cookies pears plums rice beans porridge "
    "strawberries tomatoes corn muffins grapes mushrooms noodles potatoes".split()
)
WEATHERS = {
    "sunny": "The sun was {shining|warm and bright|high in the sky}.",
    "rainy": "Rain was falling {on the roofs|from the grey clouds|and there were puddles everywhere}.",
    "windy": "The wind {was blowing hard|was strong and the trees were moving}.",
    "snowy": "Snow {was falling softly|covered everything}.",
    "foggy": "There was fog {everywhere|over the land} and it was hard to see.",
    "cloudy": "There were {big|soft|many} clouds in the sky.",
    "cold": "The air was cold {and clear|and there was ice on the ground}.",
    "warm": "The air was warm {and still|and smelled of flowers}.",
}
SEASONS = ("spring", "summer", "autumn", "winter")
TIMES = ("morning", "afternoon", "evening", "day")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
ANIMAL_FACTS = {
    "cat": ("It says meow.", "It likes to sleep, to play and to catch mice.",
            "It has soft fur and it sees well at night."),
    "dog": ("It barks.", "It likes to run, to play and to be near people.", "It has a very good nose."),
    "cow": ("It says moo.", "It eats grass all day.", "It gives us milk, and from milk we make butter and cheese."),
    "horse": ("It can run very fast.", "It eats grass and hay.", "People have ridden on its back for a long time."),
    "bee": ("It makes honey.", "It flies from flower to flower.", "It lives in a hive with many other bees."),
    "owl": ("It flies at night.", "It can turn its head very far.", "It hears the smallest sound."),
    "frog": ("It lives in water and on land.", "It jumps with its long back legs.",
             "It catches flies with its tongue."),
    "fish": ("It lives in water.", "It breathes with gills.", "It swims by moving its tail."),
    "bird": ("It has feathers and two wings.", "It lays eggs in a nest.", "Many birds sing in the morning."),
    "penguin": ("It is a bird that cannot fly.", "It swims very well.", "It lives where it is cold."),
    "elephant": ("It is the largest animal on land.", "It uses its long nose to drink and to hold things.",
                 "It lives in a family group."),
    "whale": ("It lives in the sea, but it breathes air.", "It is the largest animal in the world.",
              "It sings long songs under the water."),
    "spider": ("It has eight legs.", "It makes a web to catch flies.", "Most spiders do no harm to people."),
    "bear": ("It is big and strong.", "It eats fish, berries and honey.", "It sleeps through the winter."),
    "rabbit": ("It has long ears.", "It eats grass and carrots.", "It lives in a hole under the ground."),
    "snail": ("It carries its house on its back.", "It is very slow.", "It likes rain and wet leaves."),
    "giraffe": ("It has a very long neck.", "It eats leaves from tall trees.",
                "It is the tallest animal in the world."),
    "lion": ("It lives in a group.", "It hunts other animals.", "The male has a large mane around his head."),
}  # fmt: skip
COLOUR_OF = {
    "the sky": "blue on a clear day", "grass": "green", "snow": "white", "the sun": "yellow", "a lemon": "yellow",
    "a banana": "yellow when it is ripe", "a tomato": "red when it is ripe", "coal": "black", "milk": "white",
    "a carrot": "orange", "an orange": "orange", "a leaf in summer": "green",
    "a leaf in autumn": "red, yellow or brown", "the sea": "blue or green", "a frog": "green", "a crow": "black",
    "a strawberry": "red", "chocolate": "brown", "a cloud before the rain": "grey", "blood": "red",
    "the moon": "white or pale yellow",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Norway": "Oslo",
    "Austria": "Vienna", "India": "New Delhi", "Kenya": "Nairobi", "Peru": "Lima", "Canada": "Ottawa",
}  # fmt: skip
OPPOSITES = {
    "big": "small", "hot": "cold", "day": "night", "fast": "slow", "old": "young", "happy": "sad", "up": "down",
    "left": "right", "light": "dark", "full": "empty", "open": "closed", "wet": "dry", "loud": "quiet", "hard": "soft",
    "long": "short", "early": "late", "rich": "poor", "near": "far", "strong": "weak", "clean": "dirty",
}  # fmt: skip
