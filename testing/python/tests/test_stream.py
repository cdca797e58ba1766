"""Iterators, asyncio, threads, and what is left behind when they end early."""

import asyncio
import threading
import time
import unittest

from dacapo import AsyncLLM, InvalidInput, SamplingParams

from .models import GREEDY, smollm2, tiny

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def idle(llm, seconds=10.0):
    """Waits until the engine has nothing to do; returns its state."""
    end = time.monotonic() + seconds
    while True:
        stats = llm.stats()
        if stats["running"] + stats["queue"] == 0 and stats["pages"]["used"] == 0:
            return stats
        if time.monotonic() > end:
            raise AssertionError(f"requests are left behind: {stats['running']}, {stats['pages']}")
        time.sleep(0.01)


class Streams(unittest.TestCase):
    def test_pieces_make_the_answer(self):
        llm = smollm2()
        prompts = ["One, two, three,", "The capital of France is"]
        pieces = list(llm.stream(prompts, GREEDY))
        whole = llm.generate(prompts, GREEDY, use_tqdm=False)
        for index, output in enumerate(whole):
            of_prompt = [piece for piece in pieces if piece.prompt_index == index]
            self.assertEqual("".join(piece.text for piece in of_prompt), output.outputs[0].text)
            self.assertEqual([token for piece in of_prompt for token in piece.token_ids], output.outputs[0].token_ids)
            self.assertEqual([piece.finish_reason for piece in of_prompt if piece.finish_reason], ["length"])
            self.assertGreater(len(of_prompt), 8)

    def test_an_interrupted_generator_leaves_nothing_behind(self):
        llm = tiny()
        pages = idle(llm)["pages"]
        for piece in llm.stream(["a", "b", "c"], LONG):
            break
        stats = idle(llm)
        self.assertEqual(sum(stats["pages"].values()), sum(pages.values()))
        stream = llm.stream("a", LONG)
        next(stream)
        del stream
        idle(llm)

    def test_an_exception_in_a_callback_leaves_nothing_behind(self):
        llm = tiny()

        def fail(output):
            raise KeyError("planted")

        params = [SamplingParams(temperature=0, max_tokens=1), *[LONG] * 20]
        with self.assertRaisesRegex(KeyError, "planted"):
            llm.generate(["a"] * 21, params, use_tqdm=False, on_output=fail)
        idle(llm)
        with self.assertRaisesRegex(ZeroDivisionError, "planted"):
            for piece in llm.stream("a", LONG):
                raise ZeroDivisionError("planted")
        idle(llm)
        self.assertEqual(len(llm.generate("a", GREEDY, use_tqdm=False)), 1)


class Together(unittest.TestCase):
    def test_threads_and_asyncio_use_one_engine(self):
        llm = tiny()
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        prompts = [f"prompt {i}" for i in range(12)]
        expected = {p: llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts}
        wrong, answered = [], []

        def check(prompt, token_ids):
            answered.append(prompt)
            if token_ids != expected[prompt]:
                wrong.append(prompt)

        def of_thread(start):
            for prompt in prompts[start::2]:
                check(prompt, llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
                tokens = [token for piece in llm.stream(prompt, params) for token in piece.token_ids]
                check(prompt, tokens)

        async def of_task(engine, prompt):
            last = None
            async for output in engine.generate(prompt, params, request_id=prompt):
                last = output
            self.assertEqual((last.request_id, last.finished), (prompt, True))
            check(prompt, last.outputs[0].token_ids)

        async def of_loop():
            engine = AsyncLLM(llm)
            await asyncio.gather(*(of_task(engine, prompt) for prompt in prompts))

        threads = [threading.Thread(target=of_thread, args=(start,)) for start in range(2)]
        threads.append(threading.Thread(target=lambda: asyncio.run(of_loop())))
        for thread in threads:
            thread.start()
        asyncio.run(of_loop())
        for thread in threads:
            thread.join()
        self.assertEqual(len(answered), 4 * len(prompts))
        self.assertEqual(wrong, [])
        idle(llm)

    def test_other_threads_run_while_one_waits(self):
        llm = tiny()
        thread = threading.Thread(target=lambda: llm.generate(["a"] * 8, LONG, use_tqdm=False))
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
            time.sleep(0.001)
        thread.join()
        self.assertGreater(turns, 3, "the GIL is released while steps run")


class Asynchronous(unittest.IsolatedAsyncioTestCase):
    async def test_a_cancelled_task_leaves_nothing_behind(self):
        llm = tiny()
        engine = AsyncLLM(llm)

        async def endless():
            while True:
                async for _ in engine.generate("a", LONG):
                    pass

        task = asyncio.create_task(endless())
        await asyncio.sleep(0.02)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await asyncio.get_running_loop().run_in_executor(None, idle, llm)
        async for _ in engine.generate("a", LONG):
            break
        # The loop closes a generator that was left.
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, idle, llm)

    async def test_the_loop_is_free_while_answers_are_made(self):
        engine = AsyncLLM(tiny())
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        pieces = [piece async for piece in engine.stream(["a", "b"], LONG)]
        counting.cancel()
        self.assertEqual(len([piece for piece in pieces if piece.finish_reason]), 2)
        self.assertGreater(turns, 10)

    async def test_errors_are_raised_where_they_are_awaited(self):
        engine = AsyncLLM(tiny())
        with self.assertRaisesRegex(InvalidInput, "vocabulary"):
            async for _ in engine.generate([10**6], GREEDY):
                pass
        output = await engine.embed("hello")
        self.assertAlmostEqual(sum(x * x for x in output.outputs.embedding), 1, places=3)
