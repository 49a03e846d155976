"""Twenty edits of documents: prompts whose answers mostly repeat them."""

from __future__ import annotations

LETTER = """Dear Ms. Turner,

thank you for your order of 12 March. The two desks will be delivered to your office in Leeds on Tuesday between nine
and noon. Our drivers carry them to the second floor and take the packaging away. Please have somebody there who can
sign for the delivery. The invoice of 640 pounds is enclosed; it is due within thirty days.

Kind regards,
Peter Walsh"""

SETTINGS = """{
  "name": "warehouse",
  "host": "db.example.com",
  "port": 5432,
  "pool": {"size": 20, "timeout": 30, "recycle": 1800},
  "tables": ["orders", "customers", "items", "returns"],
  "backup": {"every": "6h", "keep": 14, "folder": "/var/backups/warehouse"},
  "logging": {"level": "info", "file": "/var/log/warehouse.log"}
}"""

CODE = """def average(numbers):
    total = 0
    for number in numbers:
        total = total + number
    if len(numbers) == 0:
        return 0
    return total / len(numbers)


def largest(numbers):
    result = numbers[0]
    for number in numbers:
        if number > result:
            result = number
    return result"""

RECIPE = """Tomato soup for four

Chop two onions and three cloves of garlic. Heat three spoons of olive oil in a large pot, and cook the onions for ten
minutes. Add the garlic, a spoon of sugar and two tins of tomatoes. Pour in half a litre of stock. Let the soup simmer
for twenty minutes, then blend it until it is smooth. Serve the soup with basil and fresh bread."""

MINUTES = """Minutes of the meeting on 4 May

Present: Anna, Boris, Carla and David.
1. The new website goes online on 1 June. Boris writes the texts, Carla takes the photographs.
2. The budget for travel is 3,000 euros. David books the train to Vienna.
3. The summer party takes place in the garden on 20 July. Anna asks the band.
The next meeting is on 18 May at ten in the small room."""

EDITS = {
    LETTER: [("Turner", "Baker"), ("Tuesday", "Friday"), ("640 pounds", "710 pounds"), ("Leeds", "York")],
    SETTINGS: [("warehouse", "archive"), ("5432", "5433"), ('"info"', '"debug"'), ("example.com", "example.org")],
    CODE: [("numbers", "values"), ("result", "best"), ("total", "amount"), ("average", "mean")],
    RECIPE: [("onions", "leeks"), ("twenty minutes", "half an hour"), ("soup", "stew"), ("basil", "parsley")],
    MINUTES: [("Boris", "Bella"), ("Vienna", "Prague"), ("18 May", "25 May"), ("garden", "park")],
}


def messages() -> list[list[dict[str, str]]]:
    """Return the twenty chats, one question each."""
    return [
        [{"role": "user", "content": f"Repeat this text, but replace {old} by {new} everywhere:\n\n{text}"}]
        for text, edits in EDITS.items()
        for old, new in edits
    ]
