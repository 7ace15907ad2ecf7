"""What callers of the ordering line say: generators of orders, digit strings and small talk, as lower-case words.

They feed speech synthesis, the joining of recorded words into new sentences, and the language model. The grammar of the orders is the
one of the recorded training orders; nothing here was taken from the development or test recordings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

__all__ = ["DIGITS", "DRINKS", "card_number", "digit_string", "number_phrase", "order", "phrase", "small_talk"]

#: "oh" is how many callers read a zero.
DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "oh")
DRINKS: Final = (
    "americano",
    "cappuccino",
    "coffee",
    "drip coffee",
    "espresso",
    "house coffee",
    "iced coffee",
    "iced mocha",
    "latte",
    "mocha",
)

_OPENINGS: Final = ("can i get", "can i have", "may i have", "i want", "i'd like", "give me", "get me", "make me", "brew")
_SIZES: Final = ("small", "medium", "large", "eight ounce", "twelve ounce", "sixteen ounce", "twenty ounce")
_SHOTS: Final = ("single shot", "double shot", "triple shot")
_ROASTS: Final = ("light roast", "medium roast", "dark roast")
_MILKS: Final = ("milk", "skim milk", "whole milk", "soy milk", "almond milk", "cream")
_SWEETS: Final = ("sugar", "brown sugar", "sweetener")
_AMOUNTS: Final = ("", "", "some", "a bit of", "a little bit of", "a lot of", "lots of")

# Off the recorded menu: they teach the pieces of words that the orders alone never use, so that hotwords can be spelt.
_OTHER_DRINKS: Final = (
    "macchiato", "cortado", "flat white", "chai latte", "hot chocolate", "green tea", "black tea", "matcha latte", "cold brew", "ristretto",
    "affogato", "lungo", "iced tea", "lemonade", "orange juice", "sparkling water", "vienna coffee", "irish coffee", "filter coffee",
    "decaf",
    "frappe", "doppio", "galao", "mazagran", "cafe au lait", "caramel macchiato", "vanilla latte", "pumpkin spice latte", "earl grey",
    "smoothie",
)  # fmt: skip
_OTHER_EXTRAS: Final = (
    "oat milk", "coconut milk", "vanilla", "caramel", "hazelnut syrup", "cinnamon", "honey", "whipped cream", "ice", "an extra shot",
    "chocolate",
    "foam", "lemon", "no sugar", "no ice", "nutmeg",
)  # fmt: skip
_FOOD: Final = (
    "muffin",
    "bagel",
    "croissant",
    "sandwich",
    "cookie",
    "blueberry muffin",
    "piece of cake",
    "cheese toast",
    "salad",
    "doughnut",
    "brownie",
)
_TALK: Final = (
    "hello", "hi there", "good morning", "good afternoon", "good evening", "thank you", "thank you very much", "thanks", "yes", "no",
    "yes please",
    "no thank you", "that's all", "that is all", "that's right", "that's wrong", "just a moment please", "one moment please",
    "could you repeat that",
    "sorry i didn't get that", "i beg your pardon", "what was that", "my name is", "this is", "speaking", "goodbye", "bye", "okay",
    "sure", "never mind",
    "cancel my order", "i want to change my order", "where is my order", "how much is that", "what does it cost", "to go", "for here",
    "to take away",
    "for pickup at", "deliver it to", "my address is", "my phone number is", "my card number is", "my account number is", "the number is",
    "the card number is", "the account number is", "it ends in", "it starts with", "the expiry date is", "the security code is",
    "please hold the line",
    "can you hear me", "is anybody there", "i have a question", "i would like to speak to somebody", "please call me back",
    "how long will it take",
    "i will pay by card", "i will pay cash", "do you have anything else", "what do you recommend", "make it two", "the same again",
    "anything else",
    "and that is everything", "hold on", "wait a second", "let me think", "actually", "please", "you are welcome", "have a nice day",
    "see you later",
    "is that correct", "that is correct", "press one for orders", "press zero for an operator", "all our agents are busy",
    "your call is important to us",
    "enter your account number followed by the pound key", "please enter your password", "the line is busy", "we are open every day",
    "around the corner",
    "my order number is", "put it on my account", "charge my card", "send me a receipt", "at the front door", "on the second floor",
    "next to the station",
)  # fmt: skip
_TEENS: Final = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_COMMON: Final = tuple(
    (  # noqa: SIM905
        "the of and to in is you that it he was for on are as with his they at be this have from or had by but not what all were we when "
        "your said there use an each which she do how their if will up other about out many then them these so some her would make like "
        "him into time has look two more write go see number way could people my than first water been call who its now find long down "
        "day did come made part over new sound take only work know place year live back give most very after thing our just name good "
        "sentence man think say great where help through much before line right too mean old any same tell boy follow came want show also "
        "around form three small set put end does another well large must big even such because turn here why ask went men read need land "
        "different home us move try kind hand picture again change off play spell air away animal house point page letter mother answer "
        "found study still learn should world high every near add food between own below country plant last school father keep tree never "
        "start city earth eye light thought head under story saw left few while along might close something seem next hard open example "
        "begin life always those both paper together got group often run important until children side feet car mile night walk white sea "
        "began grow took river four carry state once book hear stop without second later miss idea enough eat face watch far really "
        "almost let above girl sometimes mountain cut young talk soon list song being leave family body music color stand sun questions "
        "fish area mark dog horse birds problem complete room knew since ever piece told usually friends easy heard order red door sure "
        "become top ship across today during short better best however low hours black products happened whole measure remember early "
        "waves reached listen wind rock space covered fast several hold himself toward monday tuesday wednesday thursday friday saturday "
        "sunday january february march april june july august september october november december street avenue london paris chicago "
        "boston michael jennifer david linda james mary robert susan thomas karen daniel nancy george lisa kevin laura brian emma oliver "
        "sophie"
    ).split()
)


def _article(following: str) -> str:
    return "an" if following[0] in "aeiou" else "a"


def _extra(choose: random.Random, extras: Sequence[str]) -> str:
    return f"{choose.choice(_AMOUNTS)} {choose.choice(extras)}".strip()


def order(choose: random.Random) -> str:
    """Return one order of the recorded kind.

    >>> order(random.Random(3))
    'get me a light roast drip coffee with milk'
    """
    qualities = [choose.choice(kind) for kind, share in ((_SIZES, 0.45), (_SHOTS, 0.5), (_ROASTS, 0.45)) if choose.random() < share]
    choose.shuffle(qualities)
    what = " ".join([*qualities, choose.choice(DRINKS)])
    extras = [_extra(choose, _MILKS), _extra(choose, _SWEETS)]
    choose.shuffle(extras)
    extras = extras[: choose.choices((0, 1, 2), (0.25, 0.5, 0.25))[0]]
    ending = f" with {' and '.join(extras)}" if extras else ""
    return f"{choose.choice(_OPENINGS)} {_article(what)} {what}{ending}"


def _other_order(choose: random.Random) -> str:
    """Return an order of things that nobody was recorded asking for."""
    what = choose.choice((*_OTHER_DRINKS, *_OTHER_DRINKS, *_FOOD))
    if choose.random() < 0.5:
        what = f"{choose.choice((*_SIZES, *_SHOTS))} {what}"
    text = f"{choose.choice((*_OPENINGS, 'and', 'i will have', 'could i have', 'i would like'))} {_article(what)} {what}"
    if choose.random() < 0.5:
        text += f" with {_extra(choose, (*_OTHER_EXTRAS, *_MILKS))}"
    if choose.random() < 0.3:
        text += " please"
    return text


def digit_string(choose: random.Random, count: int) -> str:
    """Return ``count`` digits in words; within one string zero is either always "zero" or, more seldom, always "oh"."""
    zero = "zero" if choose.random() < 0.7 else "oh"
    return " ".join(zero if digit == 0 else DIGITS[digit] for digit in choose.choices(range(10), k=count))


def card_number(choose: random.Random) -> str:
    """Return a number as callers read one out: 3 to 16 digits."""
    return digit_string(choose, choose.choice((3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 10, 11, 12, 16)))


def _number(choose: random.Random) -> str:
    tens = f"{choose.choice(_TENS)} {choose.choice(DIGITS[1:10])}" if choose.random() < 0.6 else choose.choice((*_TENS, *_TEENS))
    if choose.random() < 0.2:
        return f"{choose.choice(DIGITS[1:10])} {choose.choice(('hundred', 'thousand'))} and {tens}"
    return tens


def small_talk(choose: random.Random) -> str:
    """Return something else that is said on such a line, or plain common words."""
    kind = choose.random()
    if kind < 0.35:
        return " ".join(choose.sample(_TALK, choose.choice((1, 1, 2))))
    if kind < 0.6:
        return _other_order(choose)
    if kind < 0.75:
        return " ".join([choose.choice(_TALK), _number(choose)])
    return " ".join(choose.sample(_COMMON, choose.randint(3, 8)))


def phrase(choose: random.Random) -> str:
    """Return any of them, in the proportions the synthetic part of the training uses."""
    kind = choose.random()
    if kind < 0.42:
        return order(choose)
    if kind < 0.8:
        number = card_number(choose)
        return f"my {choose.choice(('card', 'account', 'order'))} number is {number}" if choose.random() < 0.2 else number
    return small_talk(choose)


def number_phrase(choose: random.Random) -> str:
    """Return a number, seldom within a sentence, or an order: what voices that sound like people are asked for."""
    kind = choose.random()
    if kind < 0.2:
        return order(choose)
    number = card_number(choose)
    return f"my {choose.choice(('card', 'account', 'order'))} number is {number}" if kind < 0.3 else number
