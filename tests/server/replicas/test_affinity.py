"""Which replica answers: the one with a prompt's leading pages, unless its queue is too long."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from compiled_llm.server.replicas.affinity import Affinity, shorter_of_two
from compiled_llm.server.replicas.leading_pages import leading_pages

PROMPTS = st.lists(st.integers(0, 2), max_size=14)
SALTS = st.sampled_from([None, "", "a", "salt a"])


def pages(prompt: list[int], salt: str | None = None) -> list[bytes]:
    return leading_pages(prompt, salt, page_size=2, max_pages=5)


@given(PROMPTS, PROMPTS, SALTS, SALTS)
def test_prompts_share_keys_just_as_far_as_their_pages_and_salts_are_equal(
    one: list[int], other: list[int], salt: str | None, other_salt: str | None
) -> None:
    def equal(number: int) -> bool:
        end = 2 * (number + 1)
        return salt == other_salt and one[:end] == other[:end] and len(one) >= end <= len(other)

    keys, others = pages(one, salt), pages(other, other_salt)
    assert len(keys) == min(5, len(one) // 2)
    assert [
        number for number in range(5) if number < min(len(keys), len(others)) and keys[number] == others[number]
    ] == [number for number in range(5) if equal(number)]
    assert len({*keys, *others}) == len(keys) + len(others) - sum(map(equal, range(5)))


class Model:
    """What the table should say, written down without a limit: every page with those who were asked for it."""

    def __init__(self) -> None:
        self.loss_reported: list[tuple[list[bytes], str]] = []

    def known(self, keys: list[bytes], replica: str) -> int:
        most = 0
        for loss_reported, who in self.loss_reported:
            common = sum(1 for a, b in zip(loss_reported, keys, strict=False) if a == b)
            most = max(most, common if who == replica else 0)
        return most


@settings(max_examples=150)
@given(st.data())
def test_the_replica_that_has_most_of_a_prompt_answers_unless_its_queue_is_too_long(data: st.DataObject) -> None:
    limit, share = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    affinity: Affinity[str] = Affinity(1000, limit, share)
    model, everybody = Model(), {"a", "b", "c"}
    for _ in range(data.draw(st.integers(1, 12))):
        if len(everybody) > 1 and data.draw(st.integers(0, 5)) == 0:
            everybody.remove(data.draw(st.sampled_from(sorted(everybody))))
            affinity.forget_others(set(everybody))
            model.loss_reported = [entry for entry in model.loss_reported if entry[1] in everybody]
        keys = pages(data.draw(PROMPTS))
        queues = {replica: data.draw(st.integers(0, 8)) for replica in sorted(everybody)}
        found = affinity.choose(keys, queues)
        chosen = found.replica
        within = [replica for replica, length in queues.items() if length <= min(queues.values()) + limit]
        most = max(model.known(keys, replica) for replica in within)
        assert found.by_pages == (most > 0 and most >= share * len(keys))
        if found.by_pages:
            assert chosen in within
            assert model.known(keys, chosen) == most
            assert queues[chosen] == min(queues[replica] for replica in within if model.known(keys, replica) == most)
        else:
            assert len(queues) == 1 or queues[chosen] <= sorted(queues.values())[-2]  # not the longest of all
        model.loss_reported.append((keys, chosen))


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), max_size=30), st.integers(1, 8))
def test_what_is_remembered_is_bounded_and_of_each_prompt_a_beginning(prompts: list[list[int]], most: int) -> None:
    affinity: Affinity[str] = Affinity(most, 0, 0.0)
    for prompt in prompts:
        affinity.choose(pages(prompt), {"a": 0})
        assert len(affinity) <= most
        assert pages(prompt)[0] in affinity._owners  # that of the prompt just now is there, if only its first page
        for earlier in map(pages, prompts):
            known = [key in affinity._owners for key in earlier]
            assert known == sorted(known, reverse=True)


def test_equal_prompts_that_come_together_go_to_one_replica() -> None:
    affinity: Affinity[str] = Affinity(100, 3, 0.0)
    queues = Counter({"a": 0, "b": 0})
    for _ in range(4):
        queues[affinity.choose(pages([1, 2, 3, 4]), queues).replica] += 1
    assert sorted(queues.values()) == [0, 4]
    queues[affinity.choose(pages([1, 2, 3, 4]), queues).replica] += 1  # the fifth would be four behind others
    assert sorted(queues.values()) == [1, 4]
    queues[affinity.choose(pages([1, 2, 3, 4]), queues).replica] += 1  # both have it by now: the shorter queue
    assert sorted(queues.values()) == [2, 4]


def test_a_beginning_that_all_prompts_have_does_not_bring_them_to_one_replica() -> None:
    random.seed(0)
    affinity: Affinity[str] = Affinity(1000, 1000, 0.25)
    answered = Counter(
        affinity.choose(pages([0, 0, *[n % 7 + 1, n // 7 + 1] * 4]), {"a": 0, "b": 0}).replica for n in range(40)
    )
    assert min(answered.values()) >= 10


@pytest.mark.parametrize("count", [1, 2, 5])
def test_of_two_that_are_drawn_the_shorter_queue_is_taken(count: int) -> None:
    queues = {str(number): number for number in range(count)}
    drawn = Counter(shorter_of_two(queues) for _ in range(200))
    assert count == 1 or str(count - 1) not in drawn  # the longest never is
    assert count < 3 or len(drawn) == count - 1  # and it is not always the shortest
