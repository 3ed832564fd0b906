# ruff: noqa: E501 - a sentence with all its choices stays on one line
"""Explain in simple words how things work: each topic is a few sentences, each sentence with choices."""

EVERYDAY: dict[str, str] = {
    "a kitchen": """A kitchen is {a room|the place} where {food is made|people cook}.
{The cook|Someone} washes and cuts the {vegetables|food} first, and then cooks it {on the stove|in a pot or a pan}.
{Cold food waits in the fridge|The fridge keeps milk and meat cold}, and {dry food stands on the shelves|plates and cups stand on the shelves}.
{In a large kitchen, each cook has one task|When many people cook, each does one part of the work}: one makes the soup, another makes the {cake|bread}.
{At the end, the food goes to the table and the dishes are washed|When all is ready, the food is brought to the table}.""",
    "a garden": """A garden is {a piece of land|a place} where people grow {flowers, fruit and vegetables|plants}.
In spring, the gardener {digs the ground|makes the ground soft} and {puts seeds in it|plants seeds}.
The seeds need water, light and {time|good earth}. {Bees help, because they carry dust from flower to flower|Worms help, because they keep the earth soft}.
{In summer, the plants grow tall|During the summer, weeds must be pulled out}, and in autumn {the fruit is ripe|people bring in the fruit}.
In winter the garden {rests|sleeps} {under the snow|until the next spring}.""",
    "a ship": """A ship {is a large boat that carries people and things over the sea|carries people and goods across the water}.
It floats because it {pushes water aside|is lighter than the water it pushes away}.
{A motor turns a screw under the water|In the past the wind in the sails moved it, and today a motor does}, and {the rudder turns it left or right|a rudder at the back turns the ship}.
The captain {decides where to go|leads the ship}, and the sailors {keep everything in order|do the work on deck}.
{In the harbour, big cranes take the boxes off|When it comes to a harbour, it is tied to the land with ropes}.""",
    "a post office": """A post office {takes letters and boxes and sends them on|is the place where letters begin their way}.
First, you write the {name and the street|address} on the letter and put a stamp on it.
{Then the letters are sorted by town|Machines read the address and sort the letters}, so that all letters for one town are in one bag.
A {train or a truck|truck} carries the bags {through the night|to the other towns}.
In the morning, the {mail carrier|postman} brings each letter to the right door.""",
    "a library": """A library {keeps books and lends them to people|is a house full of books that everyone may read}.
{Each book has a number|The books stand in order}, so that {you can find it quickly|nothing gets lost}.
You {show your card|tell your name} and take a book home for {some weeks|a month}.
{When you bring it back, another person can read it|One book is read by many people, so not everyone has to buy it}.
{It is quiet there, because people read|The people who work there help you to find what you need}.""",
    "a bakery": """A bakery makes bread and {cakes|rolls}.
The baker gets up {very early|in the middle of the night}, because people want {fresh bread in the morning|warm bread for breakfast}.
He mixes flour, water, salt and yeast, and {lets the dough rest until it is big|waits until the dough has grown}.
Then he forms the {loaves|bread} and puts them into a hot oven.
{After about an hour|When the crust is brown}, the bread is ready and {goes to the shop|is sold}.""",
    "a farm": """A farm {grows the food that we eat|is where much of our food comes from}.
{The farmer plants corn and potatoes in the fields|In the fields grow corn, beans and potatoes}, and {keeps cows, pigs and hens|there are animals such as cows and hens}.
The cows give milk and the hens lay eggs. {The animals need food and water every day|The farmer feeds them every morning}.
{In autumn comes the harvest|When the plants are ripe, a big machine brings them in}, and the food is {sold in the town|brought to the market}.""",
    "a school": """A school is {a place where children learn|where children learn to read, to write and to count}.
{A teacher explains something|The teacher tells them something new}, and the children {try it on their own|ask questions and practise}.
{Between the lessons there is a break|After some lessons they have a break}, and they {play outside|eat and run around}.
{In the afternoon they go home|At the end of the day they go home} and {do their homework|tell what they have learned}.""",
    "a train station": """A train station is {the place where trains stop|where people get on and off a train}.
{A big board shows when each train leaves|You look at the board to see the time and the track of your train}.
{You buy a ticket|People buy a ticket} and wait on the platform.
{Signals tell the driver to stop or to go|A person in a control room sets the signals}, so that two trains are never on the same track.
When the doors are closed, the train {leaves|rolls out of the station}.""",
    "a lighthouse": """A lighthouse is a tall tower {by the sea|on the coast} with a {bright|strong} light on top.
At night the light {turns and can be seen from far away|shines over the water}.
{It shows the ships where the rocks are|Sailors see it and know where the land is}, so that they do not {hit the rocks|get lost}.
{In the past a keeper lived there and lit a fire|Long ago, a keeper had to light the lamp by hand}. {Today the lamp works on its own|Now a machine does this}.""",
    "a market": """A market is {a place|an open place} where people buy and sell {food and other things|things}.
{Early in the morning|Before the sun is up}, the farmers bring fruit, {eggs|cheese} and vegetables.
People walk from {table to table|one table to the next}, {look at the prices|taste a little} and choose what they like.
{When many want the same thing, the price goes up|If there is a lot of something, it is cheap}.
{In the afternoon, everything is packed up again|At the end of the day, the tables are empty}.""",
    "a beehive": """A beehive is {the home of many bees|where bees live together}.
There is one queen, and she {lays all the eggs|is the mother of all}.
The workers {fly out and bring back sweet juice from flowers|visit thousands of flowers}, and they make honey from it.
{They build small rooms out of wax|They keep the honey in small rooms made of wax}.
In winter they {stay close together to keep warm|eat the honey and keep each other warm}.""",
    "rain": """Rain {begins with the sun|comes from the clouds}.
The sun warms the water of {the sea|seas and lakes}, and a part of it {rises into the air|goes up as gas that we cannot see}.
High up it is cold, and there the water {becomes small drops|turns into tiny drops}, which we see as a cloud.
When the drops {get too heavy|grow large}, they fall as rain. {The rain flows into rivers, and the rivers flow back to the sea|Then it runs back to the sea, and it all begins again}.""",
    "a bicycle": """A bicycle has two wheels and {no motor|is moved by your legs}.
You push the pedals with your feet, a chain {carries the force to the back wheel|turns the back wheel}, and {the bicycle moves|off you go}.
{You turn with the front wheel|The front wheel shows the way}, and {the brakes make you slow|two brakes let you stop}.
As long as it {rolls fast enough|moves}, it does not fall over. {That is why it is hard to stand still|You only have to keep your balance}.""",
    "a clock": """A clock {shows the time|tells us what time it is}.
The short hand {points to the hour|goes around twice a day}, and the long hand {points to the minute|goes around once each hour}.
{Inside, small wheels turn each other|Many small wheels are inside}, and {a spring or a battery|a weight or a battery} gives the force.
Something that swings evenly, {such as a pendulum|such as a small crystal}, {keeps the speed right|makes sure that it is not too fast or too slow}.""",
    "a river": """A river {begins as a small spring in the hills|is water that flows from the hills to the sea}.
{Other streams join it|Rain and melting snow make it larger}, and so it {grows|becomes wide}.
{In the mountains it is fast|It is fast where the land is steep}, and {in flat land it is slow|it moves slowly where the land is flat}.
Fish and {birds|frogs} live in it, {towns take their water from it|and boats use it as a road}. At the end, it flows into {the sea|a lake or the sea}.""",
    "a hospital": """A hospital is {a house for sick people|where sick people get help}.
{First a nurse asks what hurts|When you come in, someone asks what is wrong}, and those who are very ill {go first|do not have to wait}.
A doctor {looks at you and finds out what it is|examines you} and {gives you medicine|decides what to do}.
{Nurses take care of you day and night|The nurses look after you} until you {can go home|are well again}.""",
    "an orchestra": """An orchestra is a large group of people who {make music together|play together}.
{Some play strings, some blow horns, and some beat drums|There are strings, horns, flutes and drums}, and each has {a sheet with notes|only one part of the music}.
{In front stands the conductor|One person, the conductor, plays nothing at all}, who {shows how fast and how loud to play|keeps all of them together}.
{They practise for weeks before a concert|When all of it fits together, it sounds like one big voice}.""",
    "a windmill": """A windmill {uses the wind to do work|turns wind into work}.
The wind pushes against {its large arms|four long arms}, and they {begin to turn|turn around}.
Inside, wheels carry {the motion|the force} down to a heavy stone, which {grinds the corn|makes flour out of corn}.
{If the wind changes, the miller turns the top of the mill|The miller turns the mill so that it faces the wind}. Today, such wheels make {electric power|light for our houses}.""",
}

MESH: dict[str, str] = {
    "the frontend": """The frontend is the {door|front door} of the mesh. It takes {requests over HTTP|the requests of the users}.
It turns {the text|your words} into tokens and {asks the router for a worker|lets the router choose a worker}.
Then it sends the tokens {back as they come|to you one by one}, so that you {can read from the first word on|do not have to wait for the whole answer}.
If you {close the page|leave}, it tells the worker to stop.""",
    "the router": """The router {decides which worker gets a request|chooses a worker for each request}.
It {knows|remembers} which blocks each worker holds in its KV cache, and {looks for|prefers} a worker that already holds the {beginning|prefix} of the prompt.
{This saves time, because those tokens need not be computed again|Then a part of the work is already done}.
It also looks at how busy each worker is, {because a long queue is worse than a cold cache|so that no one gets all the work}.""",
    "the KV cache": """The KV cache {keeps what the model has computed for earlier tokens|is the memory of the model while it reads and writes}.
For each token it holds a key and a value in {each|every} layer.
{Without it, the model would read the whole text again for each new token|With it, only the new token has to be computed}.
It is cut into blocks of {the same size|a fixed number of tokens}, and two prompts with the same beginning can share {these blocks|their first blocks}.""",
    "a prefill worker": """A prefill worker {computes the prompt|reads the prompt of a request}.
It {takes all tokens of the prompt at once|works on many tokens at the same time}, which needs {a lot of computing|much computing power}.
The result is {the first token and the blocks of the KV cache|a set of KV blocks}. It {offers|hands} them to a decode worker with a ticket.
{After that, it is free for the next prompt|Then it can take the next prompt}.""",
    "a decode worker": """A decode worker {writes the answer|makes the tokens of the answer}, one after the other.
First it {pulls|fetches} the KV blocks {from the prefill worker|that the prefill worker has computed}.
Then it {computes one token at a time|makes one token in each step} and streams it {to the frontend|back}.
It can {serve many requests in one step|work on many answers side by side}, because each step needs {little computing|mostly memory}.""",
    "the planner": """The planner {watches how busy the mesh is|looks at the load of the whole mesh}.
When {many requests come in|the answers become slow}, it adds workers, and when {it is quiet|there is little to do}, it {takes some away|removes a few}.
It {counts prefill and decode workers separately|decides how many prefill workers and how many decode workers are needed}, because long prompts need more of the first and long answers need more of the second.
{A worker that is removed first finishes what it has begun|No request is lost when a worker leaves}.""",
    "disaggregated serving": """Disaggregated serving means that {reading the prompt and writing the answer|prefill and decode} are done by different workers.
{Prefill needs much computing, and decode needs much memory|The two kinds of work are very different}, so {each can run on what suits it best|it is good to keep them apart}.
The prefill worker computes the KV blocks, and the decode worker {pulls them over|fetches them} and {goes on|streams the tokens}.
{So a long prompt does not slow down the answers of others|In this way, one long prompt does not stop all the others}.""",
    "prefix caching": """Prefix caching means that {work is not done twice|the mesh remembers the beginning of prompts}.
{Many prompts begin with the same words|Often two prompts begin in the same way}, for example with the same {system message|long story}.
The blocks of this beginning are {kept|stored} in the KV cache, and each has a hash that names {it and all blocks before it|the whole prefix}.
{When the same prefix comes again|The next time}, the worker {starts after it|only computes the rest}, and the first token comes {sooner|much faster}.""",
    "kvmesh": """kvmesh {is a mesh of small services that serve a language model|serves language models with many workers}.
The frontend takes a request, and the router picks a worker that {already holds the prefix|has the beginning of the prompt} in its KV cache.
A prefill worker computes the prompt, a decode worker {pulls the blocks and streams the tokens|fetches the blocks and writes the answer}, and the planner adds workers when {they are needed|the load grows}.
{If a worker fails, its requests go to another one|It looks like one server from the outside}.""",
    "a token": """A token is {a small piece of text|a piece of a word or a whole word}.
The model does not {see letters|read letters}. It {sees numbers|reads a list of numbers}, and each number stands for one token.
{Short and common words are one token|A common word is one token}, and {long or rare words are cut into several|a rare word is made of several}.
The answer is also made token by token, and {then the tokens are turned back into text|each is turned back into text}.""",
    "a KV block": """A KV block is {a piece of the KV cache|a small part of the KV cache} that holds a fixed number of tokens, {for example 16 or 64|such as 16}.
{When it is full, it gets a hash and can be shared|A full block can be shared by all prompts that begin in the same way}.
{Blocks that nobody uses are kept for a while|Old blocks stay in memory until the place is needed}, and the oldest are {thrown out|removed} first.
Workers {send each other blocks|can fetch blocks from each other}, {so that nothing is computed twice|which is faster than to compute them again}.""",
    "the time to first token": """The time to first token is {how long you wait until the answer begins|the time from your question to the first word of the answer}.
It {depends on|grows with} the length of the prompt {and on the queue|and on how busy the workers are}.
A prompt whose beginning is already in the KV cache {is faster|has a short time to first token}.
After that, {the time between two tokens counts|what you notice is the time between tokens}, which should be {short and even|always the same}.""",
}

# What the topics are also called in a question
MESH_NAMES = {
    "the KV cache": "a KV cache", "a prefill worker": "prefill", "a decode worker": "decode", "the router": "routing",
    "the frontend": "a frontend", "the planner": "a planner", "a token": "tokens", "a KV block": "KV blocks",
    "disaggregated serving": "disaggregation", "prefix caching": "a prefix cache", "kvmesh": "this mesh",
    "the time to first token": "TTFT",
}  # fmt: skip
