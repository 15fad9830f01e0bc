"""What the demo asks by default: a text of more than 512 tokens, with a question about it at the end."""

PASSAGE = """\
The lighthouse on Sula Point was built in 1871 by a stonemason called Henrik Dahl. He had never built a tower \
before, so he began by making a small one out of bread in his kitchen, and when it did not fall over he drew it on \
paper, ten times as large in every direction. The work took four summers. The stone came from an island to the \
north, one boat at a time, and every boat had to wait for the tide. When the lamp was lit for the first time, people \
walked out from the village with their supper in baskets and stayed on the rocks until the morning.

For eighty years the lamp burned oil. A keeper carried the cans up the stairs, a hundred and twelve steps, twice \
every night. The last keeper was a woman called Marta Lind. She kept a goat, a boat and a notebook. The goat gave \
milk, the boat brought the mail, and in the notebook she wrote down the weather three times a day: at six, at noon \
and at nine. She never missed an entry, not even on the night of the great storm, when the windows broke and the \
wind blew the page out of her hand. She wrote that night on the wall instead, and the words can still be read there: \
"Wind from the west. Lamp is lit. Goat is indoors."

When electricity came to Sula Point, the lamp no longer needed a keeper, and the harbour office sent a letter to say \
so. Marta read it, folded it into her notebook and went on as before. The office sent a second letter, and then a \
young engineer. He stayed for a week. He measured the light, the fog horn and the stairs. In the evenings he read \
the notebooks, forty of them, and on the last day he asked whether he could borrow them. With thirty years of \
weather from one place, written down by one person at the same three hours, he could show that the storms came \
earlier every year and that the fog came later. Ships changed their routes because of it, and two harbours built \
their walls higher.

After that nobody wrote letters to Marta any more. She was paid to look after the weather instead of the lamp, and \
the goat, which by then was the third of its name, was entered in the books of the harbour office as an assistant. \
The lighthouse is a museum today. Visitors climb the stairs, look at the sea, and on the way down they stop in front \
of the wall where the words are. Children usually ask about the goat. In the kitchen, under a cover of glass, there \
is a small tower made of bread. It is not the one that Henrik Dahl made, which was eaten by his family on the day \
the lamp was lit, but a new one is baked every summer, and so far none of them has fallen over."""

QUESTION = "Who was the last keeper of the lighthouse, and which animal did she keep?"

PROMPT = f"Read this text.\n\n{PASSAGE}\n\nAnswer in one sentence: {QUESTION}"
