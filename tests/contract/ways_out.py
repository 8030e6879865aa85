"""Ways out of a loop: run by every Python that is there, with the path of ``loop_exit.py``.

Prints as JSON, for each way, what ``left_by_break`` said whenever the loop's iterator was closed. Standard library
only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys

spec = importlib.util.spec_from_file_location("loop_exit", sys.argv[1])
loop_exit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loop_exit)

said = []


def loop():
    try:
        for number in range(5):
            yield number, number
    except GeneratorExit:
        said.append(loop_exit.left_by_break(sys._getframe(1)))
        raise


@contextlib.contextmanager
def entered():
    yield


class Trouble(Exception):
    pass


def trouble():
    raise Trouble


# -- left by the script


def by_break():
    for _ in loop():
        break


def by_break_in_a_branch():
    for number, _ in loop():
        if number > 2:
            break
        continue


def by_break_in_with():
    for _ in loop():
        with entered():
            break


def by_break_in_try():
    for _ in loop():
        try:
            break
        finally:
            len(said)


def by_break_in_a_handler():
    for _ in loop():
        try:
            trouble()
        except Trouble:
            break


def by_break_after_an_inner_loop():
    for _ in loop():
        for _ in range(2):
            break
        while True:
            break
        break


def by_break_in_match():
    for pair in loop():
        match pair:
            case (2, _):
                break


def by_break_with_else():
    for _ in loop():
        break
    else:
        trouble()


def by_break_through_enumerate():
    for _, (_, _) in enumerate(loop()):
        break


def by_break_through_zip():
    for _ in zip(loop(), range(9), strict=False):
        break


def by_break_of_what_hands_on():
    def generator():
        yield from loop()

    for _ in generator():
        break


def by_break_in_a_generator():
    def generator():
        for _ in loop():
            break
        yield

    list(generator())


def by_break_inside_a_loop_around():
    for _ in range(3):
        for _ in loop():
            break


def by_return():
    for _ in loop():
        return


def by_return_of_a_value():
    for number, _ in loop():
        return [number, len(said)]
    return None


def by_return_in_with():
    for number, _ in loop():
        with entered(), entered():
            return number
    return None


# -- left by an exception, or not left


def not_by_raise():
    for _ in loop():
        raise Trouble


def not_by_a_call_that_raises():
    for _ in loop():
        trouble()


def not_by_raise_in_with():
    for _ in loop():
        with entered():
            trouble()


def not_by_raise_that_is_caught_around():
    with contextlib.suppress(Trouble):
        for _ in loop():
            trouble()


def not_by_assert():
    for number, _ in loop():
        if number >= 0:
            raise AssertionError


def not_by_exit():
    for _ in loop():
        sys.exit()


def not_by_unpacking():
    for _, _, _ in loop():
        pass


def not_by_close():
    held = loop()
    next(held)
    held.close()


def not_by_del():
    held = loop()
    for _ in held:
        break
    del held


# -- left by the script, while a generator of its own holds the iterator: Python 3.13 closes one that would not notice
# -- without running it, and earlier ones let an exception pass through it


def wrapped_by_break():
    def wrapper():
        for pair in loop():  # noqa: UP028 - the point of it
            yield pair

    for _ in wrapper():
        break


def found():
    answers = {}
    for name, way in list(globals().items()):
        if name.startswith(("by_", "not_by_", "wrapped_")):
            said.clear()
            # Often enough for an interpreter that puts faster instructions in the place of these.
            for _ in range(100):
                with contextlib.suppress(Trouble, AssertionError, SystemExit, ValueError):
                    way()
            answers[name] = sorted(set(said)), len(said)
    return answers


if __name__ == "__main__":
    answers = {"plain": found()}
    sys.settrace(lambda *_: lambda *_: None)
    answers["traced"] = found()
    sys.settrace(None)
    print(json.dumps({"version": sys.version_info[:2], "can_tell": loop_exit.can_tell(), "found": answers}))
