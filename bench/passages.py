"""Passages of text, written for this, and what is asked of them: answers quote at length."""

ASKED = "Summarise the following text. Use only exact quotes from it.\n\n"

PASSAGES = (
    "The harbour office of Lindholm published its yearly report on Monday. The number of ships "
    "that called at the port rose from 812 to 947, the highest figure since the new quay was "
    "opened. Most of the growth came from small coastal vessels that carry timber, fish and "
    "stone. The harbour master, Ingrid Dahl, said that the port had reached the limit of what "
    "its two cranes could lift in a working day. She asked the town council to pay for a third "
    "crane before the end of next year. The council will discuss the request in March. "
    "Fishermen who use the northern basin complained that larger ships make it hard to leave at"
    " dawn. The report also mentions that the lighthouse on the western pier was repaired after"
    " the storm in November, and that its lamp was replaced by one that needs a tenth of the "
    "power.",
    "The water wheel at Ashby Mill turned again on Saturday for the first time in sixty years. "
    "About two hundred people came to watch when the sluice was opened at noon. The wheel, "
    "which is five metres high and made of oak, was rebuilt by a group of eleven volunteers "
    'over four winters. They used drawings that were found in the attic of the old school. "We '
    'did not know whether it would turn or break," said Martin Hale, who led the work. The mill'
    " ground its first sack of flour in the afternoon, and the flour was given to the bakery in"
    " the village. The group now wants to repair the roof of the barn beside the mill. It has "
    "asked for a grant of forty thousand pounds, and an answer is expected in the spring.",
    "A team of biologists has counted the bats that live in the old railway tunnel near Corran."
    " They found more than three thousand animals of five species, twice as many as in the last"
    " count ten years ago. The largest colony belongs to the lesser horseshoe bat, which is "
    "rare in the north of the country. The biologists believe that the bats came to the tunnel "
    "when several barns in the valley were torn down. The tunnel is to be opened to cyclists in"
    " two years. The team recommends that the cycle path be closed at night from April to "
    "October, and that lamps in the tunnel be red and dim. The railway trust said that it would"
    " follow both recommendations.",
)
