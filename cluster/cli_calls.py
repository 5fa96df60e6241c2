"""Commands that call a server: `generate`, `chat`, `status`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kvferry.cluster.cli_shared import PemFile, TokenFile, shown
from kvferry.cluster.config import DEFAULT_HOST, DEFAULT_PORT, ClientTls
from kvferry.runtime.errors import InvalidArgument, KvferryError
from kvferry.runtime.request import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry.cluster.client import AsyncClient, Client
    from kvferry.cluster.service import Completed

_DEFAULTS = SamplingParams()
STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Door:
    """Which server to call, and how it is guarded."""

    target: Annotated[str, shown("HOST:PORT")] = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    """Address of the server, HOST:PORT."""
    token_file: TokenFile = None
    """File whose first line is the server's secret."""
    tls: tyro.conf.FlagCreatePairsOff[bool] = False
    """Encrypt, and trust the well-known certificate authorities. Implied by the next three."""
    tls_ca: PemFile = None
    """Encrypt, and trust these certificate authorities only."""
    tls_cert: PemFile = None
    """Certificate to show to the server."""
    tls_key: PemFile = None
    """Private key of --tls-cert."""

    @property
    def encrypted(self) -> bool:
        return bool(self.tls or self.tls_ca or self.tls_cert or self.tls_key)

    def open(self, timeout_s: float | None) -> Client:
        """`timeout_s`: of each call."""
        from kvferry.cluster.client import Client

        return Client(self.target, token=self._token(), tls=self._tls(), timeout_s=timeout_s)

    def async_client(self, target: str) -> AsyncClient:
        """To `target`, which may be a proxy before the server. Without a deadline of its own."""
        from kvferry.cluster.client import AsyncClient

        return AsyncClient(target, token=self._token(), tls=self._tls())

    def _token(self) -> str | None:
        from kvferry.cluster.api.security import read_token

        return None if self.token_file is None else read_token(self.token_file)

    def _tls(self) -> ClientTls | None:
        return ClientTls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key) if self.encrypted else None


@dataclass(frozen=True, kw_only=True)
class Server(Door):
    """Which server to call, and how."""

    timeout_s: Annotated[float | None, shown("SECONDS", "no limit; 10 for status")] = None
    """When to give up."""

    def client(self, default_timeout_s: float | None = None) -> Client:
        return self.open(default_timeout_s if self.timeout_s is None else self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose each next token."""

    max_tokens: int = 256
    """Most tokens of an answer."""
    min_tokens: int = _DEFAULTS.min_tokens
    """Fewest tokens of an answer."""
    temperature: float = _DEFAULTS.temperature
    """0 always takes the most likely token; higher values dare more."""
    top_p: float = _DEFAULTS.top_p
    """Choose among the most likely tokens that together reach this probability. 1 is off."""
    top_k: int = _DEFAULTS.top_k
    """Choose among so many of the most likely tokens. 0 is off."""
    min_p: float = _DEFAULTS.min_p
    """Choose among tokens with at least this share of the most likely one's probability. 0 is off."""
    repetition_penalty: float = _DEFAULTS.repetition_penalty
    """Above 1 makes tokens of the prompt and the answer so far less likely."""
    presence_penalty: float = _DEFAULTS.presence_penalty
    """Above 0 makes tokens of the answer so far less likely."""
    frequency_penalty: float = _DEFAULTS.frequency_penalty
    """As --presence-penalty, for each time that a token was used."""
    seed: Annotated[int | None, shown("INT", "random")] = None
    """The same seed gives the same answer."""
    stop: Annotated[tuple[str, ...], shown("TEXT [TEXT ...]", "none")] = ()
    """Texts that end the answer."""
    ignore_eos: tyro.conf.FlagCreatePairsOff[bool] = _DEFAULTS.ignore_eos
    """Go on after the model says that it is done."""

    def fields(self) -> dict[str, Any]:
        """Keyword arguments for `Client.stream`."""
        return {**vars(self), "stop": list(self.stop)}


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text, and print the continuation as it comes."""

    prompt: Annotated[tyro.conf.Positional[str], shown("TEXT")]
    """The text; - reads it from standard input."""
    n: int = 1
    """Number of continuations; more than one are printed at the end."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object at the end instead: texts, token ids, usage, timeline."""
    timeline: tyro.conf.FlagCreatePairsOff[bool] = False
    """Afterwards say on standard error where the time went, and what had to begin anew and why."""
    priority: int = 0
    """Smaller is sooner; a step is a head start of some seconds."""
    retry_budget: Annotated[int | None, shown("INT", "what the server allows")] = None
    """How often the answer may begin anew on other workers after a loss."""
    sampling: Sampling = field(default_factory=Sampling)
    server: Server = field(default_factory=Server)

    def run(self) -> None:
        from kvferry.cluster.client import Collector
        from kvferry.cluster.service import Delta

        prompt = _standard_input() if self.prompt == "-" else self.prompt
        collector = Collector()
        live, at_line_start = self.n == 1 and not self.json, True
        with self.server.client() as client:
            options = {"priority": self.priority, "retry_budget": self.retry_budget, **self.sampling.fields()}
            try:
                for event in client.stream(prompt, n=self.n, **options):
                    collector.add(event)
                    if live and isinstance(event, Delta) and event.text:
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                        at_line_start = event.text.endswith("\n")
            except KvferryError:
                sys.stdout.write("" if at_line_start else "\n")  # the error stands in a line of its own
                sys.stdout.flush()
                raise
        if self.json:
            import msgspec

            sys.stdout.write(msgspec.json.encode(collector.output).decode())
        elif not live:
            sys.stdout.write("\n".join(f"[{output.index}] {output.text}" for output in collector.output.outputs))
        sys.stdout.write("\n")
        if self.timeline and collector.output.timeline is not None:
            from kvferry.cluster.cli_status import show_timeline

            show_timeline(collector.output.timeline)


def _standard_input() -> str:
    # Bytes that are no UTF-8 become lone surrogates, which the client refuses with a clear message.
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with a model. /quit or Ctrl-D ends, /new forgets what was said, Ctrl-C stops an answer."""

    system: Annotated[str | None, shown("TEXT", "none")] = None
    """Instructions that stand before the conversation."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1024))
    server: Server = field(default_factory=Server)

    def run(self) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        with self.server.client() as client:
            model = client.model()
            if not model.has_chat_template:
                raise InvalidArgument("model", model.model, "has no chat template", "use `kvferry generate`")
            console.print(
                f"[bold]{model.model}[/bold], {model.max_context} tokens of context. /quit ends.", markup=True
            )
            self._converse(client, console)

    def _converse(self, client: Client, console: Console) -> None:
        beginning = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = list(beginning)
        while True:
            try:
                said = console.input("[bold cyan]>[/bold cyan] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if said == "/quit":
                return
            if said == "/new":
                messages = list(beginning)
            elif said:
                messages.append({"role": "user", "content": said})
                if not self._answer(client, console, messages):
                    messages.pop()

    def _answer(self, client: Client, console: Console, messages: list[dict[str, str]]) -> bool:
        """Streams an answer and appends it. False: refused, nothing was appended."""
        from kvferry.cluster.service import Completed, Delta

        text, end = "", ""
        try:
            for event in client.stream(messages=messages, **self.sampling.fields()):
                if isinstance(event, Delta):
                    text += event.text
                    console.out(event.text, end="", highlight=False)
                elif isinstance(event, Completed):
                    end = _summary(event)
        except KeyboardInterrupt:
            end = "stopped"
        except KvferryError as error:
            console.print(f"\n{error}", style="red", markup=False)
            if not text:
                return False
            end = "broken off"
        console.print(f"\n{end}", style="dim", markup=False)
        messages.append({"role": "assistant", "content": text})
        return True


def _summary(completed: Completed) -> str:
    usage, timeline = completed.usage, completed.timeline
    parts = [f"{usage.num_output_tokens} tokens", f"{usage.num_cached_tokens} of {usage.num_prompt_tokens} cached"]
    if timeline.first_token_ns is not None:
        parts.append(f"first after {(timeline.first_token_ns - timeline.received_ns) / 1e6:.0f} ms")
        if timeline.finished_ns is not None and timeline.finished_ns > timeline.first_token_ns:
            seconds = (timeline.finished_ns - timeline.first_token_ns) / 1e9
            parts.append(f"{(usage.num_output_tokens - 1) / seconds:.1f} tokens/s")
    if timeline.attempts > 1:
        causes = ", ".join(dict.fromkeys(setback.cause.value for setback in timeline.setbacks))
        parts.append(f"{timeline.attempts} attempts ({causes})")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Show the groups of a server: role, epoch, free KV blocks, cache hits, queue."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON instead of a table."""
    audit: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also compare all ledgers and block pools; exit with code 1 if something does not agree."""
    server: Server = field(default_factory=Server)

    def run(self) -> None:
        with self.server.client(STATUS_TIMEOUT_S) as client:
            cluster = client.cluster()
            findings = client.audit().findings if self.audit else None
        if self.json:
            import msgspec

            view = msgspec.to_builtins(cluster)
            if findings is not None:
                view["findings"] = findings
            sys.stdout.write(msgspec.json.encode(view).decode() + "\n")
        else:
            from kvferry.cluster.cli_status import show

            show(cluster, findings)
        if findings:
            raise KvferryError(f"the audit has {len(findings)} findings")
