"""What a rank said last is heard, also where it never read what was said to it."""

import socket

from triptych.services.executor.rank_group import receive
from triptych.services.transport.fd_passing import FdConnection
from triptych.v1 import stage_pb2


def test_a_bye_is_heard_from_who_left_words_unread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = FdConnection(ours, 1.0)
    connection.send_packet(b"never read")
    theirs.send(stage_pb2.RankMessage(bye=stage_pb2.RankBye()).SerializeToString())
    theirs.close()
    message = receive(connection)
    assert message is not None
    assert message.HasField("bye")
    assert receive(connection) is None
    connection.close()
