// What the server says, as JSON. All of it is read; nothing is ever sent.

export class Gone extends Error {}

/**
 * Asks for `api/PATH`. Questions that are undefined, null or empty are left out.
 *
 * @throws {Gone} where nobody answers
 * @throws {Error} what the server says is wrong, as its message
 */
export async function ask(path, questions = {}, signal = undefined) {
  const asked = new URLSearchParams(Object.entries(questions).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  const query = asked.size ? `?${asked}` : "";
  let answer;
  try {
    answer = await fetch(`api/${path}${query}`, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("the server does not answer");
  }
  const told = await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(problemOf(told) ?? `the server answered ${answer.status}`);
  return told;
}

/** What the server says is wrong, and what would be right. */
export function problemOf(told) {
  return told?.problem && [told.problem, told.remedy].filter(Boolean).join(": ");
}

/** Runs one question at a time: a newer one ends the older. */
export function newest() {
  let going = null;
  return async (path, questions) => {
    going?.abort();
    const mine = (going = new AbortController());
    try {
      return await ask(path, questions, mine.signal);
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    }
  };
}

/** Calls `act` at once, and then at most each `ms`; the last call is never lost. */
export function seldom(ms, act) {
  let last = -Infinity;
  let timer = 0;
  return () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = 0;
      last = performance.now();
      act();
    }, Math.max(0, last + ms - performance.now()));
  };
}
