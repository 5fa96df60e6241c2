"""Waits that `check_waits.py` lets pass, each with the reason why it ends.

Two kinds only: waits for something local that always comes or is woken when its owner is closed, and waits that end
with their other side's death while somebody else watches its silence.
"""

from __future__ import annotations

_GROUP_TIMEOUT = "the group was made with a timeout, which holds for each of its calls"
_OWN_QUEUE = "waits for its own process to have something to say; closing or cancelling wakes it"
_CLIENT = "the client's call: it ends with its deadline, its cancel or its connection"
_LOCAL_CLOSE = "closes our end of a channel, without grace for calls"
_SILENCE = "the other side owes nothing; the supervisor ends a group that is silent for dead_after_s"
_PROXIED = "a connection may be silent for as long as it stands; `cut` breaks it"

ALLOWED: dict[str, str] = {
    "runtime/model/parallel.py _LocalExchange.swap self._group.barrier.wait": _GROUP_TIMEOUT,
    "runtime/model/parallel.py _GlooExchange.swap self._group.allgather().wait": _GROUP_TIMEOUT,
    "runtime/transfer/link.py SendLink._next self.life.changed.wait": _OWN_QUEUE,
    "runtime/transfer/shm.py ShmTransport._listen self._listener.accept": "`close` shuts the socket, which wakes it",
    "cluster/api/grpc.py _guard.guarded await answer()": "`answer` is a method of `Calls`, which is read",
    "cluster/api/health.py Health.Watch await changed.wait()": _CLIENT,
    "cluster/api/security.py TokenInterceptor.intercept_service await continuation()": "finds a handler, runs none",
    "cluster/client.py AsyncClient.generate async for events": _CLIENT,
    "cluster/client.py AsyncClient._events async for call": _CLIENT,
    "cluster/group.py FrameSocket.send self._sock.sendall": "SO_SNDTIMEO is set on the socket",
    "cluster/group.py FrameSocket._exactly self._sock.recv_into": _SILENCE + "; keepalive finds a dead host",
    "cluster/wire.py TcpWire.receive await self._reader": _SILENCE,
    "cluster/wire.py TcpWire._on_readable self._sock.recv": "the socket does not block",
    "cluster/wire.py dial_tcp await asyncio.get_running_loop().sock_connect()": "`connect` has the deadline",
    "cluster/wire.py WireServer._accept await asyncio.get_running_loop().sock_accept()": "until the server is stopped",
    "cluster/launch.py RunningCluster.usable await asyncio.shield()": "set when the deployment is usable or ends",
    "cluster/launch.py RunningCluster.ended await asyncio.shield()": "serves until it is told to close",
    "cluster/launch.py RunningCluster._until_closed self._closing.wait": "serves until it is told to close",
    "cluster/launch.py RunningCluster._ray_lost await self._closing.wait()": "serves until it is told to close",
    "cluster/launch.py RunningCluster._until_closed await asyncio.wait()": "serves until it is told to close",
    "cluster/peer_stream.py RemoteGroup._ticket await answer": "`_answer` has the deadline",
    "cluster/transfers.py Transfers.pass_on await answer": "the port's answer has a deadline",
    "cluster/placing.py Placer._wait await record.wake.wait()": "woken by events and membership; its deadline is "
    "around it, and a group that falls silent is abandoned, which wakes it",
    "cluster/ray_groups.py RayGroup.wait_dead await asyncio.wait()": "the supervisor watches silence beside it",
    "cluster/ray_groups.py RayGroup.bring_up.load async for ….load.options().remote()": "`call` has the deadline",
    "cluster/ray_groups.py RayGroup.bring_up.load await reference": "`call` has the deadline",
    "cluster/worker.py Worker.load loading.result": "it is done by then",
    "cluster/ray_groups.py _result await reference": "`call` and the supervisor put deadlines around it",
    "cluster/gateway.py Gateway.generate async for stream": "the coordinator ends every stream",
    "cluster/stream.py RequestStream.__anext__ await self._ready.wait()": "the coordinator ends every stream",
    "cluster/supervisor.py Supervisor.usable await self._changed.wait()": "cancelled when the deployment is closed",
    "cluster/supervisor.py Supervisor._watch await asyncio.wait()": "one of the three watches silence, with a deadline",
    "cluster/worker.py Worker.wait_end threading.Event().wait": "ends with its process, which is what it is for",
    "cluster/coordinator.py Coordinator.idle await self._ends.over.wait()": "the gateway bounds its drain",
    "cluster/moving.py Mover._take_away await sequence.news.wait()": "`empty` puts its deadline around it",
    "cluster/moving.py Mover._until await sequence.news.wait()": "`empty` puts its deadline around it",
    "cluster/chaos/load.py Load._one await asyncio.wait()": "each stream has a deadline",
    "cluster/chaos/proxy.py CuttableProxy.__aenter__ await asyncio.start_server()": "binds a port of this machine",
    "cluster/chaos/proxy.py CuttableProxy.__aexit__ await self._server.wait_closed()": "all connections were cut",
    "cluster/chaos/proxy.py CuttableProxy._serve await asyncio.wait()": _PROXIED,
    "cluster/chaos/proxy.py _copy await reader.read()": _PROXIED,
    "cluster/chaos/run.py Chaos._disturb await asyncio.wait()": "each stream has a deadline, and no new ones begin",
    "cluster/chaos/run.py Chaos._leave await leave()": "`Load.cancel` and `Load.cut` have deadlines",
    "cluster/chaos/run.py Chaos._released await anext()": "the call has a deadline",
    "cluster/operations.py Operations.run await asyncio.shield()": "each step of an operation has its deadline",
    "cluster/supervisor.py Supervisor.run await asyncio.get_running_loop().create_future()": "until it is cancelled",
    "cluster/supervisor.py Supervisor.add await asyncio.shield()": "a group's start has deadlines and a bound of tries",
}
